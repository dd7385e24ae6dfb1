"""Flat functions: functions of tensors and numbers by position, each compiled by an engine of its own.

Tensors that the user's function closes over are *lifted*: they are arguments of the flat function. Lifted tensors that
are still found where the function closes over them need not be passed: the engine's function is *unlifted*.
"""

# Results and arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13

from pygraph.autograd.levels import plain_of
from pygraph.autograd.preserved_state import Effects
from pygraph.autograd.result_spec import ResultSpec, flatten_result
from pygraph.calls.engine import Engine
from pygraph.errors import TraceError
from pygraph.ir.descriptors import Captured, TensorSpec
from pygraph.ir.program import Program
from pygraph.tracing.function_kinds import Rebinding

Lookup: TypeAlias = "Callable[[], Any]"
"""A function that returns the tensor that the user's function closes over now."""


class EngineOwner:
    """An object with engines of its own."""

    def engines(self) -> Iterator[Engine]:
        """Iterate over its engines."""
        raise NotImplementedError


class FlatFunction(EngineOwner):
    """A function of tensors and numbers by position.

    Args:
        function: The engine of the user's function.
        name: The name in reports.
        arity: How many tensors it takes.
        lifted: By position, the lookups of lifted tensors.

    Attributes:
        differentiable: By result, whether it has a gradient; None if all have.
        input_aliases: The results that are inputs or views of these, which are made outside.
        effects: Its effects besides computing results, if it has any.
        repeats: Whether it runs the user's function a second time, for which the state of the first run is restored.
        may_save: Whether a `pygraph.autograd.forward.Forward` of it may run instead.
        returns_fresh: Whether its results are known to be distinct tensors that share no memory with its arguments.
    """

    input_aliases: frozenset[int] = frozenset()
    effects: Effects | None = None
    repeats = False
    may_save = False
    returns_fresh = False

    def __init__(self, function: Engine, name: str, arity: int, lifted: dict[int, Lookup]) -> None:
        self.function = function
        self.name = name
        self.arity = arity
        self.lifted = lifted
        self._lifted = frozenset(lifted)
        self._not_lifted = [index for index in range(arity) if index not in lifted]
        self.differentiable: tuple[bool, ...] | None = None
        self._derived: dict[Any, FlatFunction] = {}
        self._engines: dict[frozenset[int], Engine] = {}

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], ResultSpec]:
        """Run the function without its engine; the results' tensors, and the spec of the user's result."""
        raise NotImplementedError

    def run_leaves(self, *leaves: Any) -> Any:
        """Run the function of its tensors and then numbers; the user's result, and its batch dimensions."""
        tensors, spec = self.run(leaves[: self.arity], leaves[self.arity :])
        return spec.unflatten(tensors), spec.out_dims

    def has_gradient(self, index: int) -> bool:
        """Whether result number ``index`` has a gradient."""
        return self.differentiable is None or self.differentiable[index]

    def derive(self, key: Any, make: Callable[[], FlatFunction]) -> Any:
        """Return the derived function that ``make`` makes, made once for each key."""
        if key not in self._derived:
            self._derived.setdefault(key, make())
        return self._derived[key]

    def run_compiled(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any], *, unchanged: bool = False
    ) -> tuple[list[torch.Tensor], ResultSpec, Any]:
        """Run the function by its engine on plain tensors.

        Args:
            tensors: The tensors that it takes.
            numbers: The numbers that it takes.
            unchanged: Whether the closed-over tensors are known to be those that were lifted.

        Returns:
            The results' tensors, their spec, and the pull-back of the call, as `unpack` does.
        """
        if unchanged:
            unlifted, passed = self._lifted, self._not_lifted
        else:
            unlifted = frozenset(i for i, lookup in self.lifted.items() if _is_same_memory(tensors[i], lookup()))
            passed = [index for index in range(len(tensors)) if index not in unlifted]
        detached: dict[int, torch.Tensor] = {}  # one for each object, as the function may compare identities
        for tensor in (tensors[index] for index in passed):
            if id(tensor) not in detached:
                detached[id(tensor)] = _detached(tensor)
        arguments = [detached[id(tensors[index])] for index in passed]
        found, spec, pullback = self.unpack(self.engine(unlifted)(*arguments, *numbers))
        original = {id(argument): tensors[index] for index, argument in zip(passed, arguments, strict=True)}
        return [original.get(id(tensor), tensor) for tensor in found], spec, pullback

    def plan_of(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[Any, Any] | None:
        """Return the native dispatcher and plan of a call of the engine that finds lifted tensors; None if none."""
        detached = {id(tensor): _detached(tensor) for tensor in (tensors[index] for index in self._not_lifted)}
        arguments = tuple(detached[id(tensors[index])] for index in self._not_lifted)
        with torch.no_grad():
            return self.engine(self._lifted).cache.native.match((*arguments, *numbers))

    def unpack(self, result: Any) -> tuple[list[torch.Tensor], ResultSpec, Any]:
        """Return the tensors of an engine's result, their spec, and the call's pull-back if it is not the usual one."""
        returned, out_dims = result
        tensors, spec = flatten_result(returned)
        return tensors, dataclasses.replace(spec, out_dims=out_dims) if out_dims else spec, None

    def engine(self, unlifted: frozenset[int]) -> Engine:
        """Return the engine that runs the function where these lifted tensors are not passed."""
        if unlifted not in self._engines:
            self._engines.setdefault(unlifted, self.function.derive(self.unlift(unlifted)))
        return self._engines[unlifted]

    def unlift(self, unlifted: frozenset[int]) -> Any:
        """Return the function of all tensors but these, which the user's function finds where it closes over them."""
        return UnliftedFunction(self, unlifted)

    def engines(self) -> Iterator[Engine]:
        """Iterate over the engines of this function and of all that are derived from it."""
        for engine in list(self._engines.values()):
            yield engine
            programs = (entry.reported for entry in engine.cache.entries)
            for static in (static.value for program in programs if program is not None for static in program.statics):
                if isinstance(static, EngineOwner):
                    yield from static.engines()
        for derived in list(self._derived.values()):
            yield from derived.engines()


class UnliftedFunction(Rebinding):
    """A flat function of which some lifted tensors are no arguments; its trace captures them.

    Args:
        flat: The flat function.
        unlifted: The positions of the tensors that are no arguments.
    """

    def __init__(self, flat: FlatFunction, unlifted: frozenset[int]) -> None:
        self.flat = flat
        self.unlifted = unlifted
        self.__name__ = flat.name
        self.__wrapped__: Any = flat.function.fn  # the function that closes over them

    def __call__(self, *leaves: Any) -> Any:
        """Run the flat function."""
        return self.flat.run_leaves(*self.fill(leaves))

    def fill(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the flat function's arguments: these, with the tensors that are no arguments here."""
        rest = iter(leaves)
        found = [self.flat.lifted[i]().detach() if i in self.unlifted else next(rest) for i in range(self.flat.arity)]
        return [*found, *rest]

    def rebound(self) -> list[torch.Tensor]:
        """Return the closed-over tensors for which others are passed."""
        found = (lookup() for index, lookup in self.flat.lifted.items() if index not in self.unlifted)
        return [tensor for tensor in found if tensor is not None]

    def check(self, program: Program) -> None:
        """Refuse closed-over tensors that a custom ``Function``'s backward reads after the user's function returned."""
        rebound = [plain_of(tensor) for tensor in self.rebound()]
        for descriptor in program.inputs:
            if isinstance(descriptor, Captured) and any(_is_same_memory(descriptor.value, now) for now in rebound):
                raise TraceError(f"a derivative of {self.__name__} reads a tensor that was not passed to its forward")


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its history; a parameter stays one."""
    plain = tensor.detach()
    return torch.nn.Parameter(plain, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else plain


def _is_same_memory(one: torch.Tensor, other: Any) -> bool:
    """Whether a plain tensor has the memory and the layout of another value, so that either may be read."""
    if one is other:
        return True
    if not isinstance(other, torch.Tensor):
        return False
    if is_functorch_wrapped_tensor(other) or one.data_ptr() != other.data_ptr() or not one.data_ptr():
        return False
    return TensorSpec.of(one) == TensorSpec.of(other)
