"""Discovery of sites: a first run of a function on fake tensors, which shows what it reads, writes and returns."""

# Arguments are of any type, and fakes and torch.func's stack have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pygraph.autograd.flat import Place, Primal, Settings, take_apart
from pygraph.autograd.levels import (
    is_special,
    is_tracked,
    levels,
    plain_of,
)
from pygraph.autograd.repeating import Effects
from pygraph.autograd.sharing import Shared, shared_results
from pygraph.autograd.site import Site, describe_tensor, special_among
from pygraph.autograd.substitution import Substitution, substituting
from pygraph.calls.engine import Engine
from pygraph.errors import TraceError
from pygraph.guards.environment import Environment
from pygraph.guards.objects import holds_tensors
from pygraph.ir.effects import is_random, is_view, root, written_arguments
from pygraph.ir.leaves import is_live_number
from pygraph.tracing.argument_changes import stored_attribute
from pygraph.tracing.call_environment import reached_besides
from pygraph.tracing.function_kinds import Rebinding
from pygraph.tracing.gradients import leaves_behind
from pygraph.tracing.hidden_writes import updated_in_hiding
from pygraph.tracing.recording import Recording
from pygraph.tracing.specialization import record_call

# A closure of a hundred tensors is found in as many rounds at worst; usually in one.
_MAX_ROUNDS = 100


def discover(
    function: Engine, leaves: Sequence[Any], tree: pytree.TreeSpec, static: frozenset[int],
    settings: Settings,
) -> tuple[Site, tuple[int, ...]]:  # fmt: skip
    """Run a function once on fake tensors, and look at what it uses and does.

    Returns:
        The site, and the leaves whose numbers decide what the function does.

    Raises:
        TraceError: Calls like this cannot be made one operation of their tensors.
    """
    args, kwargs = pytree.tree_unflatten(list(leaves), tree)
    environment = reached_besides(function.fn, args, kwargs)
    lifted = [tensor for tensor in environment.tensors if is_special(tensor)]
    before: set[int] = set()
    for _ in range(_MAX_ROUNDS):
        probe = _Probe(function, lifted, settings)
        count = len(leaves)
        row = _stand_ins([*leaves, *lifted])
        given = (*pytree.tree_unflatten(row[:count], tree), row[count:])
        with temporarily_clear_interpreter_stack():
            recording, decisive = record_call(probe, given, {}, static, function.name)
        if not probe.found:
            break
        lifted += probe.found
        plain = {id(plain_of(tensor)) for tensor in probe.found}
        if plain == before:
            raise TraceError(f"{function.name} wraps what it closes over anew each time")
        before = plain
    else:
        raise TraceError(f"{function.name} closes over ever more tensors")
    effects = _Effects(recording, len(leaves))
    used = [t for i, t in enumerate(lifted) if i in effects.used or id(t) in probe.returned]
    places = [_places(environment, tensor) for tensor in used]
    environment.release(used)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    numbers = [i for i, leaf in enumerate(leaves) if i not in static and is_live_number(leaf)]
    primal = Primal(function, tree, leaves, tensors, numbers, places, settings)
    primal.differentiable = probe.differentiable
    row = [*tensors, *(len(leaves) + next(i for i, t in enumerate(lifted) if t is tensor) for tensor in used)]
    for index, shared in probe.shared().items():
        if shared.operand in row:
            primal.shared[index] = dataclasses.replace(shared, operand=row.index(shared.operand))
    if effects.draws or effects.writes:
        written = {index: effects.written[leaf] for index, leaf in enumerate(row) if leaf in effects.written}
        primal.effects = Effects(effects.draws, written, effects.captured)
    everything = [*leaves, *lifted]
    tracked = any(is_tracked(everything[leaf]) for leaf in effects.written)
    if not probe.differentiable:
        raise TraceError(f"{function.name} returns no tensor")
    reason = _why_not_an_operation(probe, any(map(is_tracked, (everything[leaf] for leaf in row))))
    if reason is not None:
        raise TraceError(f"{function.name} {reason}")
    described = tuple(map(describe_tensor, used))
    site = Site(
        primal, environment, described, special_among(environment), effects.draws, effects.writes, tracked,
        probe.differentiates,
    )  # fmt: skip
    return site, tuple(index for index in numbers if index in decisive)


def _why_not_an_operation(probe: _Probe, is_differentiated: bool) -> str | None:
    """Why results have gradients that an operation of its operands cannot have; None if they have not.

    Args:
        probe: The run on fakes.
        is_differentiated: Whether any operand is.
    """
    if probe.makes_leaf:
        return "returns a tensor that it has made to require grad, so that gradients come together in it"
    if any(probe.differentiable) and not is_differentiated:
        return "returns what requires grad for a tensor that it has made, and nothing that it was passed does"
    if probe.reaches_made and levels():
        return "returns what requires grad for a tensor that it has made, where torch.func's transforms are active"
    return None


def _places(environment: Environment, tensor: torch.Tensor) -> tuple[Place, ...]:
    return tuple(environment.guards.locations(tensor)) or (functools.partial(_itself, tensor),)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _stand_ins(leaves: Sequence[Any]) -> list[Any]:
    """Fakes for tensors, as these are at the current level; other leaves as they are."""
    made: dict[int, torch.Tensor] = {}
    mode = FakeTensorMode()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made:
            made[id(leaf)] = _stand_in(leaf, mode)
    return [made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _stand_in(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    tracked = is_tracked(tensor)
    shape, stride = tuple(tensor.shape), tensor.stride()
    with temporarily_clear_interpreter_stack(), mode:
        fake: Any = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        fake.requires_grad_(tracked)
    if isinstance(tensor, torch.nn.Parameter):
        fake._is_param = True
    return fake


def _is_made_inside(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of the run on fakes, whatever transforms inside the function have made of it."""
    return isinstance(plain_of(tensor), FakeTensor)


def _is_of_functorch(value: Any) -> bool:
    """Whether any tensor is of a transform of torch.func inside the function; the pull-back of its vjp outlives it."""
    return any(
        isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in pytree.tree_leaves(value)
    )


_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward, torch.Tensor.requires_grad_)
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad)


class _Finding(Substitution):
    """Also notes special tensors that nothing was given for, and refuses what concerns autograd's own graph."""

    def __init__(self, given: dict[int, torch.Tensor]) -> None:
        super().__init__(given)
        self.found: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}
        self.differentiates = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKS:
            raise TraceError(f"it calls {func.__name__} on a tensor that is differentiated outside")
        if func is torch.autograd.grad and not all(map(_is_made_inside, pytree.tree_leaves(args[0]))):
            raise TraceError("it differentiates what was computed outside")
        self.differentiates |= func in _DERIVATIVES and not levels() and not _is_of_functorch(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def instead(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._given or not is_special(tensor) or _is_made_inside(tensor):
            return super().instead(tensor)
        if id(tensor) not in self.found:
            self.found[id(tensor)] = tensor
            shape, stride = tuple(tensor.shape), tensor.stride()
            with temporarily_clear_interpreter_stack():  # it is outside of transforms inside the function
                made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
            self._made[id(tensor)] = made
        return self._made[id(tensor)]


class _Probe(Rebinding):
    """The function, with stand-ins for what it closes over; it notes what else it needs them for.

    Attributes:
        found: Tensors that the function closes over and that nothing was given for.
        differentiable: By result, whether it has a gradient.
        returned: The ids of tensors that it closes over and returns.
        differentiates: Whether it uses autograd by itself.
        makes_leaf: Whether it returns a leaf of autograd's graph that it has made itself.
        reaches_made: Whether the graph of a result leads to such a leaf, returned or not.
    """

    def __init__(self, function: Engine, lifted: Sequence[torch.Tensor], settings: Settings) -> None:
        self.__name__ = function.name
        self.__wrapped__ = function.fn
        self.found: list[torch.Tensor] = []
        self.differentiable: tuple[bool, ...] = ()
        self.returned: set[int] = set()
        self.differentiates = False
        self.makes_leaf = self.reaches_made = False
        self._run: tuple[list[torch.Tensor], list[Any]] = [], []
        self._settings = settings
        self._lifted = lifted

    def rebound(self) -> list[torch.Tensor]:
        """What was lifted."""
        return list(self._lifted)

    def shared(self) -> dict[int, Shared]:
        """What results of the run are of the leaves of its arguments, and of what was given for other tensors."""
        results, operands = self._run
        first = len(operands) - len(self._lifted)
        themselves = {id(tensor): first + index for index, tensor in enumerate(self._lifted)}
        return shared_results(results, operands, themselves)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[torch.Tensor]) -> None:
        finding = _Finding({id(tensor): fake for tensor, fake in zip(self._lifted, given, strict=True)})
        with self._settings.restored(), substituting(finding):
            result = self.__wrapped__(*args, **kwargs)
        if any(holds_tensors(leaf) and not holds_tensors(leaf, FakeTensor) for leaf in pytree.tree_leaves(result)):
            raise TraceError("it returns an object with tensors that was there before")
        results, _ = take_apart(result)
        self.differentiable = tuple(tensor.requires_grad for tensor in results)
        self.returned = {id(tensor) for tensor in results}
        self.differentiates = finding.differentiates
        operands = [*pytree.tree_leaves((args, kwargs)), *given]
        self._run = results, operands
        passed = set(map(id, operands))
        fresh = (tensor for tensor in results if isinstance(tensor, FakeTensor) and id(tensor) not in passed)
        carried = next(filter(None, map(stored_attribute, fresh)), None)
        if carried is not None:
            raise TraceError(f"it returns a tensor that carries {carried}")
        made = [leaf for leaf in leaves_behind(results) if isinstance(leaf, FakeTensor) and id(leaf) not in passed]
        self.makes_leaf = any(leaf is result for leaf in made for result in results)
        self.reaches_made = bool(made)
        missing = [t for t in results if is_special(t) and not _is_made_inside(t)]
        known = {id(tensor) for tensor in self._lifted}
        self.found = [*finding.found.values()]
        self.found += [t for t in missing if id(t) not in known and id(t) not in finding.found]


class _Effects:
    """What a recorded function does besides computing its results.

    Attributes:
        draws: Whether it draws random numbers.
        writes: Whether it updates tensors that it was passed or closes over.
        written: The leaves that it updates, and whether its results depend on what they were.
        captured: The tensors that it closes over and updates, likewise.
        used: Of the tensors after the first ``count`` leaves, those that it reads.
    """

    def __init__(self, recording: Recording, count: int) -> None:
        nodes = list(recording.module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        leaf_of = {node: descriptor.leaf for node, descriptor in zip(placeholders, recording.inputs, strict=True)}  # pyright: ignore
        self.draws = any(is_random(node) for node in nodes)
        roots = {root(a) for node in nodes for a in (*written_arguments(node), *updated_in_hiding(node))}
        self.writes = any(node.op in ("placeholder", "get_attr") for node in roots)
        self.written = {leaf_of[node]: _is_read(node) for node in roots if node in leaf_of}
        updated = {node.target for node in roots if node.op == "get_attr"}
        captured: dict[str, bool] = {}
        for node in nodes:
            if node.op == "get_attr" and node.target in updated:
                captured[str(node.target)] = captured.get(str(node.target), False) or _is_read(node)
        self.captured: tuple[tuple[torch.Tensor, bool], ...] = tuple(
            (getattr(recording.module, name), is_read) for name, is_read in captured.items()
        )
        self.used = {leaf - count for node, leaf in leaf_of.items() if leaf >= count and node.users}


def _is_read(node: fx.Node) -> bool:
    """Whether more is done with a value than to update it: what an update returns counts, where it is used."""
    for user in node.users:
        if is_view(user):
            if _is_read(user):
                return True
        elif node not in updated_in_hiding(user) and (node not in written_arguments(user) or user.users):
            return True
    return False
