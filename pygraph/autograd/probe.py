"""Probes: a function that is run once on fake tensors, to see which tensors it closes over and what it returns."""

# Arguments are of any type, and fakes and torch.func's stack have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from pygraph.autograd.input_aliases import InputAlias, find_input_aliases
from pygraph.autograd.levels import is_active, levels, plain_of
from pygraph.autograd.result_spec import flatten_result
from pygraph.autograd.settings import Settings
from pygraph.autograd.substitution import Substitution, substituting
from pygraph.calls.engine import Engine
from pygraph.errors import TraceError
from pygraph.guards.locations import is_updated, memory_of
from pygraph.guards.objects import holds_tensors
from pygraph.tracing.argument_changes import stored_attribute
from pygraph.tracing.function_kinds import Rebinding
from pygraph.tracing.gradients import leaves_behind


class Probe(Rebinding):
    """The user's function, run with fake tensors for the lifted ones.

    Args:
        function: The engine of the function.
        lifted: The tensors that it closes over, for which fake tensors are passed.
        settings: The settings under which it runs.

    Attributes:
        found: Active tensors that the function closes over, and any that it returns, if they are not lifted.
        differentiable: By result, whether it has a gradient.
        returned: The ids of the results.
        differentiates: Whether the function uses autograd by itself.
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
        """Return the lifted tensors."""
        return list(self._lifted)

    def input_aliases(self) -> dict[int, InputAlias]:
        """Return the results of the run that are its arguments or lifted tensors, or views of these."""
        results, operands = self._run
        first = len(operands) - len(self._lifted)
        closed_over = {id(tensor): first + index for index, tensor in enumerate(self._lifted)}
        return find_input_aliases(results, operands, closed_over)

    def why_not_an_operation(self, is_differentiated: bool) -> str | None:
        """Return why results have gradients that an operation of its operands cannot have; None if they have not.

        Args:
            is_differentiated: Whether any operand is.
        """
        if self.makes_leaf:
            return "returns a tensor that it has made to require grad, so that gradients come together in it"
        if any(self.differentiable) and not is_differentiated:
            return "returns what requires grad for a tensor that it has made, and nothing that it was passed does"
        if self.reaches_made and levels():
            return "returns what requires grad for a tensor that it has made, where torch.func's transforms are active"
        return None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[torch.Tensor]) -> None:
        """Run the function.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            given: The fake tensors for the lifted ones.

        Raises:
            TraceError: Its result cannot be the result of an operation.
        """
        search = _ClosureSearch({id(tensor): fake for tensor, fake in zip(self._lifted, given, strict=True)})
        with self._settings.restored(), substituting(search):
            result = self.__wrapped__(*args, **kwargs)
        if any(holds_tensors(leaf) and not holds_tensors(leaf, FakeTensor) for leaf in pytree.tree_leaves(result)):
            raise TraceError("it returns an object with tensors that was there before")
        results, _ = flatten_result(result)
        self.differentiable = tuple(tensor.requires_grad for tensor in results)
        self.returned = {id(tensor) for tensor in results}
        self.differentiates = search.differentiates
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
        missing = [t for t in results if not _is_made_inside(t)]  # which are returned as the objects that they are
        known = {id(tensor) for tensor in self._lifted}
        self.found = [*search.found.values()]
        self.found += [t for t in missing if id(t) not in known and id(t) not in search.found]


_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward, torch.Tensor.requires_grad_)
_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.retain_grad)
_READS = frozenset({
    is_updated, memory_of, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point,
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("data", "requires_grad", "shape", "dtype", "device")),
    vars(torch._C.TensorBase)["data"].__set__,
})  # fmt: skip


class _ClosureSearch(Substitution):
    """A substitution that also collects active tensors without a replacement, and refuses hooks and outer gradients."""

    def __init__(self, given: dict[int, torch.Tensor]) -> None:
        super().__init__(given)
        self.found: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}
        self.differentiates = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        if func in _HOOKS:
            raise TraceError(f"it calls {func.__name__} on a tensor that is differentiated outside")
        if func is torch.autograd.grad and not all(map(_is_made_inside, pytree.tree_leaves(args[0]))):
            raise TraceError("it differentiates what was computed outside")
        if self._assigned and torch.is_grad_enabled() and func not in _READS:
            leaves = pytree.tree_leaves((args, kwargs))
            if any(id(leaf) in self._assigned and is_active(leaf) for leaf in leaves):
                raise TraceError("it assigns .data of a tensor that is differentiated outside")
        self.differentiates |= func in _DERIVATIVES and not levels() and not _is_of_functorch(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def replacement(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._assigned:
            return tensor
        if id(tensor) in self._given or not is_active(tensor) or _is_made_inside(tensor):
            return super().replacement(tensor)
        if id(tensor) not in self.found:
            self.found[id(tensor)] = tensor
            shape, stride = tuple(tensor.shape), tensor.stride()
            with temporarily_clear_interpreter_stack():  # it is outside of transforms inside the function
                made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
            self._made[id(tensor)] = made
        return self._made[id(tensor)]


def _is_made_inside(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made by the run on fakes, and perhaps wrapped by transforms inside the function."""
    return isinstance(plain_of(tensor), FakeTensor)


def _is_of_functorch(value: Any) -> bool:
    """Whether any tensor is of a transform of torch.func inside the function; the pull-back of its vjp outlives it."""
    return any(
        isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf) for leaf in pytree.tree_leaves(value)
    )
