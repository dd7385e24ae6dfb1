"""What is known of one kind of call of a function inside a larger whole, from a first run on fake tensors."""

# Arguments are of any type, and fakes and torch.func's stack have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pygraph.autograd.flat import Place, Primal, Settings, take_apart
from pygraph.autograd.levels import (
    Level,
    ambient,
    batching_levels,
    is_batched,
    is_special,
    is_tracked,
    levels,
    plain_of,
    saved_tensors_hooks,
)
from pygraph.autograd.repeating import Effects
from pygraph.autograd.sharing import Shared, shared_results
from pygraph.autograd.substitution import Substitution, substituting
from pygraph.calls import retries
from pygraph.calls.keys import UnhashableError, form_of, static_key
from pygraph.calls.plans import Reached
from pygraph.calls.retries import Traces
from pygraph.calls.surroundings import NOTHING_ON_DEVICE
from pygraph.errors import DisturbedTraceError, StateChangeError, TraceError
from pygraph.guards.environment import Environment, Item, Variable, modes_of
from pygraph.guards.locations import Location, are_same
from pygraph.guards.objects import holds_tensors
from pygraph.ir.effects import is_random, is_view, root, written_arguments
from pygraph.ir.leaves import is_live_number
from pygraph.tracing.argument_changes import stored_attribute
from pygraph.tracing.call_environment import objects_among, reached_besides
from pygraph.tracing.function_kinds import Rebinding
from pygraph.tracing.gradients import leaves_behind
from pygraph.tracing.hidden_writes import updated_in_hiding
from pygraph.tracing.leaks import leaving_nothing
from pygraph.tracing.recording import Recording
from pygraph.tracing.specialization import record_call

if TYPE_CHECKING:
    from pygraph.calls.transformed import Transformed

# So often other tensors may be where those were that a plan guards; a function that sees others each time has no plan.
_MAX_REPLANNED = 8

# A closure of a hundred tensors is found in as many rounds at worst; usually in one.
_MAX_ROUNDS = 100


class InlineError(Exception):
    """A call runs as it is, for the reason that the message gives."""


class UntraceableError(InlineError):
    """The same, where it has been found out just now that calls like this cannot be traced as part of a larger whole.

    They may be traced by themselves: what they do is not what others of their kind have done.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Refused:
    """Why calls with arguments like these run as they are, while the function's modules are in these modes.

    With ``once``, that was so of one call alone, as of a first one that fills a cache: it has ``filled`` these places.
    Where such calls follow each other, it is so ``until`` there may be another trace.
    """

    reason: str
    modes: Environment | None
    once: bool = False
    until: Traces | None = None
    filled: tuple[Location, ...] = ()
    calls: int = 0
    seconds: float = 0.0

    def changed(self) -> str | None:
        """What is not as it was, as a user would write it; None if that is not known."""
        return None if self.modes is None else self.modes.changed()

    def is_current(self) -> bool:
        """Whether that holds now."""
        if self.once or (self.until is not None and self.until.allow_another()):
            return False
        return self.modes is None or self.modes.is_current()

    def may_return(self) -> bool:
        """Whether it may hold again, although it may not now."""
        return not self.once and self.until is None and (self.modes is None or self.modes.may_return())

    def engines(self) -> Iterator[Transformed[..., Any]]:
        """No compiled functions."""
        return iter(())

    def discard_plans(self) -> None:
        """There are none."""


@dataclasses.dataclass(eq=False)
class Site:
    """What is known of calls with arguments like these.

    Attributes:
        primal: The function of its tensors and numbers.
        environment: What else it depends on.
        lifted: What the tensors were like that it closes over and that are passed to it.
        unused: Which other tensors that it could use carry gradients or batches.
        draws: Whether it draws random numbers.
        writes: Whether it updates tensors.
        writes_tracked: Whether it updates tensors that are differentiated.
        differentiates: Whether it uses autograd by itself.
        baked: The leaves whose numbers decide what the function does.
        refusals: Why calls must run as they are, by torch.func's transforms around them; found out by calls.
        planned: What the plans by which calls come here natively depend on, and these plans.
        calls: How many calls it has served besides the one that it was found out for.
        seconds: What it took to find it out.
        traces: The budget of such calls.
    """

    primal: Primal
    environment: Environment
    lifted: tuple[Hashable, ...]
    unused: frozenset[int]
    draws: bool
    writes: bool
    writes_tracked: bool
    differentiates: bool
    baked: tuple[int, ...] = ()
    refusals: dict[tuple[Level, ...], str] = dataclasses.field(default_factory=dict)
    planned: tuple[Reached, list[object]] | None = None
    calls: int = 0
    seconds: float = 0.0
    traces: Traces = dataclasses.field(default_factory=Traces)
    _replanned: int = 0

    def is_current(self) -> bool:
        """Whether it still describes calls: nothing that the function reaches has changed."""
        if not self.environment.is_current():
            return False
        groups = [[place() for place in places] for places in self.primal.places]
        found: list[Any] = [values[0] for values in groups]
        if not all(isinstance(value, torch.Tensor) and is_special(value) for value in found):
            return False
        # One tensor may have become two since, or two one.
        if any(other is not values[0] for values in groups for other in values) or len({*map(id, found)}) < len(found):
            return False
        return tuple(map(describe_tensor, found)) == self.lifted and _special_among(self.environment) == self.unused

    def changed(self) -> str | None:
        """What is not as it was, as a user would write it; None if that is not known."""
        return self.environment.changed()

    def serves(self) -> None:
        """Note a call that it was there for."""
        self.calls += 1
        if self.calls <= retries.SETTLED:
            self.traces.is_used(self.calls)

    def may_return(self) -> bool:
        """Whether it may describe calls again, although it may not now."""
        return self.environment.may_return()

    def engines(self) -> Iterator[Transformed[..., Any]]:
        """Its compiled functions."""
        return self.primal.engines()

    def reached(self) -> Reached:
        """What it depends on besides arguments, with the tensors that it closes over now."""
        places = [place for places in self.primal.places for place in places]
        lifted = (place() for place in self.primal.lifted.values())
        return Reached(
            self.environment, (*lifted, *self.environment.tensors),
            tuple((place.container, place.key, place()) for place in places if isinstance(place, Item)),
            tuple((place.cell, place()) for place in places if isinstance(place, Variable)),
        )  # fmt: skip

    @property
    def may_be_planned(self) -> bool:
        """Whether plans are of use: what it closes over does not change all the time."""
        return self._replanned <= _MAX_REPLANNED

    def plans_for(self, reached: Reached) -> list[object] | None:
        """The plans that depend on this, to add to them; None if there can be none."""
        if self.planned is None or not self.planned[0].is_same(reached):
            self.discard_plans()
            self._replanned += 1
            if not self.may_be_planned or not reached.is_plain():
                return None
            self.planned = reached, []
        return self.planned[1]

    def discard_plans(self) -> None:
        """Have no call come here natively."""
        if self.planned is not None:
            self.primal.function.discard_plans(self.planned[1])
            self.planned = None

    def tensors(self, leaves: Sequence[Any], lifted: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The tensors of a call with these leaves, and those that the function closes over now."""
        if lifted is None:
            lifted = [place() for place in self.primal.lifted.values()]
        return [*(leaves[i] for i in self.primal.tensors), *lifted]

    def numbers(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The live numbers of a call with these leaves."""
        return tuple(leaves[index] for index in self.primal.numbers)

    def refusal(self, stack: Sequence[Level], tensors: Sequence[torch.Tensor]) -> str | None:
        """Why a call at this place must run as it is; None if it may be compiled."""
        if Level.OTHER in stack:
            return "a transform of torch.func is active that is neither vmap, grad nor jvp"
        if "graphify" in self.primal.function.passes and all(tensor.is_cpu for tensor in tensors):
            return NOTHING_ON_DEVICE
        if tuple(stack) in self.refusals:
            return self.refusals[tuple(stack)]
        if self.differentiates and stack:
            return "it uses autograd where torch.func's transforms are active"
        if self.writes_tracked:
            return "it updates a tensor in place that is differentiated"
        if _saved_tensors_are_changed() and ambient(tensors)[0]:
            return "hooks on tensors that autograd saves are active"
        if not self.draws and not self.writes:
            return None
        backwards, forwards = ambient(tensors)
        once = [*([Level.GRAD] if backwards else []), *stack]
        differentiated = any(level is not Level.VMAP for level in once) or forwards
        if differentiated and (forwards or once[0] is not Level.GRAD or set(once[1:]) - {Level.VMAP}):
            return "it draws random numbers or updates tensors, and is not differentiated last and once"
        if self.writes and differentiated and stack:
            return "it updates tensors in place where torch.func differentiates"
        if self.draws and not all(any(is_batched(t, level) for t in tensors) for level in batching_levels()):
            return "it draws random numbers for a batch of which it gets no tensor"
        return None

    def note_failure(self, stack: Sequence[Level], error: RuntimeError) -> None:
        """Note that calls below these transforms fail, if they do not as they are.

        A derivative takes some operations apart, and ``vmap`` around it then batches the parts. Here vmap meets the
        operations themselves, as a call is differentiated last, and it may have no rule for them.

        Raises:
            InlineError: It is such a failure; it has changed nothing.
        """
        if _NO_RULE in str(error) and set(stack) != {Level.VMAP} and not self.draws and not self.writes:
            self.refusals[tuple(stack)] = f"torch cannot batch an operation that a derivative would take apart: {error}"
            raise InlineError(self.refusals[tuple(stack)]) from None


_NO_RULE = "Batching rule not implemented"  # torch 2.11 and 2.13


def _saved_tensors_are_changed() -> bool:
    """Whether what is saved may not be what is restored; checkpoints restore what their functions save again."""
    hooks = saved_tensors_hooks()
    return hooks is not None and hooks[0].__module__ != torch.utils.checkpoint.__name__


def find_site(
    function: Transformed[..., Any], leaves: Sequence[Any], tree: pytree.TreeSpec, static: frozenset[int]
) -> Site:
    """What is known of a call, found out if need be.

    Raises:
        InlineError: It cannot be traced.
        UntraceableError: The same, and that is new.
    """
    settings = Settings.now()
    try:
        key = (tree, static, _leaf_keys(leaves, static), settings)
    except UnhashableError:
        raise InlineError("an argument cannot be part of a cache key") from None
    baked = function.sites.baked.get(key, ())
    kind = (key, _values(leaves, baked))
    known = function.sites.get(kind)
    if isinstance(known, Refused):
        raise InlineError(known.reason)
    if known is not None:
        known.serves()
    else:
        form = form_of((key, ()))
        traces = function.sites.traces_of(form)
        reason = function.sites.refusal(kind, traces, of_objects=form is not key)
        if reason is not None:
            raise InlineError(reason)
        began = retries.clock()
        try:
            with function.turn():
                known, baked = leaving_nothing(
                    f"trace({function.function_name})(…)",
                    lambda: _discover(function, leaves, tree, static, settings),
                )
        except DisturbedTraceError as error:
            raise InlineError(str(error)) from error  # the next call is traced again
        except TraceError as error:
            before = function.sites.latest(kind)
            adds = isinstance(error, StateChangeError) and (before is None or error.fills)
            last = before if isinstance(before, Refused) else None
            once = adds and not (last is not None and last.once)
            until = None
            if isinstance(error, StateChangeError) and error.fills:
                until = last.until if last is not None and last.until is not None else Traces()
                if not once:  # twice in a row
                    until.is_unsteady(retries.clock() - began)
            modes = None
            if not once and until is None:
                modes = modes_of(function.fn, objects_among(*pytree.tree_unflatten(list(leaves), tree)))
            filled = error.locations or () if isinstance(error, StateChangeError) and error.fills else ()
            function.sites.put(kind, Refused(str(error), modes, once, until, filled))
            # One that fills other places than the last time fills a memo, for another key.
            is_memo = until is not None and not (last is not None and are_same(filled, last.filled))
            refusal = InlineError if once or is_memo else UntraceableError
            raise refusal(str(error)) from error
        known.baked = function.sites.baked[key] = baked
        known.traces, known.seconds = traces, retries.clock() - began
        traces.is_made(known.seconds)
        function.sites.put((key, _values(leaves, baked)), known)
    return known


def _values(leaves: Sequence[Any], numbers: Sequence[int]) -> tuple[Hashable, ...]:
    return tuple(leaf.item() if isinstance(leaf := leaves[index], torch.Tensor) else leaf for index in numbers)


def _leaf_keys(leaves: Sequence[Any], static: frozenset[int]) -> tuple[Hashable, ...]:
    keys: list[Hashable] = []
    first: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            keys.append((first.setdefault(id(leaf), index), *describe_tensor(leaf)))
        elif index not in static and is_live_number(leaf):
            keys.append(leaf.__class__)
        else:
            keys.append(static_key(leaf, index))
    return tuple(keys)


def describe_tensor(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What a trace depends on of a tensor as it is at the current level."""
    kind = isinstance(tensor, torch.nn.Parameter)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, kind, tensor.requires_grad, is_tracked(tensor))


def _discover(
    function: Transformed[..., Any], leaves: Sequence[Any], tree: pytree.TreeSpec, static: frozenset[int],
    settings: Settings,
) -> tuple[Site, tuple[int, ...]]:  # fmt: skip
    """Run the function once on fakes, and look at what it uses and does; also the leaves that decided that."""
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
            recording, decisive = record_call(probe, given, {}, static, function.function_name)
        if not probe.found:
            break
        lifted += probe.found
        plain = {id(plain_of(tensor)) for tensor in probe.found}
        if plain == before:
            raise TraceError(f"{function.function_name} wraps what it closes over anew each time")
        before = plain
    else:
        raise TraceError(f"{function.function_name} closes over ever more tensors")
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
        raise TraceError(f"{function.function_name} returns no tensor")
    reason = _why_not_an_operation(probe, any(map(is_tracked, (everything[leaf] for leaf in row))))
    if reason is not None:
        raise TraceError(f"{function.function_name} {reason}")
    described = tuple(map(describe_tensor, used))
    site = Site(
        primal, environment, described, _special_among(environment), effects.draws, effects.writes, tracked,
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


def _special_among(environment: Environment) -> frozenset[int]:
    return frozenset(id(tensor) for tensor in environment.tensors if is_special(tensor))


def _places(environment: Environment, tensor: torch.Tensor) -> tuple[Place, ...]:
    return tuple(environment.locations(tensor)) or (functools.partial(_itself, tensor),)


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

    def __init__(self, function: Transformed[..., Any], lifted: Sequence[torch.Tensor], settings: Settings) -> None:
        self.__name__ = function.function_name
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
