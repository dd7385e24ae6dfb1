"""Sites: kinds of calls inside a transform or under autograd, with their flat functions or the reasons against it."""

# Arguments are of any type, and fakes and torch.func's stack have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from pygraph.autograd.levels import (
    Level,
    ambient,
    batching_levels,
    is_active,
    is_batched,
    is_tracked,
    saved_tensors_hooks,
)
from pygraph.autograd.primal import Primal
from pygraph.calls import limits
from pygraph.calls.engine import Engine
from pygraph.calls.plans import Planned
from pygraph.calls.requirements import CapturedTensor, Requirements
from pygraph.calls.retries import Traces
from pygraph.calls.surroundings import InlineError
from pygraph.guards.environment import Environment
from pygraph.guards.locations import Item, Location, Variable
from pygraph.ir.effects import ON_CPU


class _Known:
    """A kind of calls of which it is known how they run, as `pygraph.calls.variants` caches it.

    Attributes:
        calls: How many calls it has served besides the one that it was found out for.
        seconds: How long it took to find out.
        stamp: The time of the last call, by the clock of the function's native plans.
    """

    calls: int = 0
    seconds: float = 0.0
    stamp: int = 0

    @property
    def seconds_of_engines(self) -> float:
        """How long its engines have compiled."""
        return sum(engine.cache.seconds for engine in self.engines())

    @property
    def cost(self) -> float:
        """The seconds that are lost with it."""
        return self.seconds + self.seconds_of_engines

    def is_valid(self) -> bool:
        """Whether it holds for a call of its kind now."""
        return self.is_current()

    def is_current(self) -> bool:
        """Whether nothing that it depends on has changed."""
        raise NotImplementedError

    def engines(self) -> Iterator[Engine]:
        """Iterate over the engines of its functions."""
        return iter(())

    def note_planned_calls(self) -> None:
        """Bring the stamp up to date with the calls that came by native plans."""

    def discard_plans(self) -> None:
        """Have native plans not lead to it any more."""


@dataclasses.dataclass(eq=False)
class Refused(_Known):
    """A kind of calls that run as they are.

    Attributes:
        reason: The reason.
        modes: The modes of the function's modules for which it holds; None if it does not depend on them.
        once: Whether it held for one call only, as for a first one that fills a cache.
        until: The budget of traces after which such calls are traced again, where each of them fills a cache.
        filled: The locations that the last one has filled.
    """

    reason: str
    modes: Environment | None
    once: bool = False
    until: Traces | None = None
    filled: tuple[Location, ...] = ()

    def changed(self) -> str | None:
        """Return the first state that has changed, as a user would write it; None if it is not known."""
        return None if self.modes is None else self.modes.changed()

    def is_current(self) -> bool:
        """Whether the reason holds now."""
        if self.once or (self.until is not None and self.until.allow_another()):
            return False
        return self.modes is None or self.modes.is_current()

    def may_return(self) -> bool:
        """Whether the reason may hold again, although it does not now."""
        return not self.once and self.until is None and (self.modes is None or self.modes.may_return())


@dataclasses.dataclass(eq=False)
class Site(_Known):
    """A kind of calls that run as flat functions.

    Attributes:
        primal: The function of its tensors and numbers.
        environment: Python's state that it depends on.
        lifted: Descriptions of the lifted tensors, see `describe_tensor`.
        unused: The ids of other tensors that it could reach and that are batched or differentiated.
        draws: Whether it draws random numbers.
        writes: Whether it updates tensors.
        writes_tracked: Whether it updates tensors that are differentiated.
        differentiates: Whether it uses autograd by itself.
        baked: The leaves whose numbers decide which operations the function runs.
        refusals: Why calls must run as they are, by torch.func's transforms around them, as calls have shown.
        planned: The state that native plans of such calls depend on, and the plans.
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
    planned: tuple[Requirements, list[Planned]] | None = None
    traces: Traces = dataclasses.field(default_factory=Traces)
    _replanned: int = 0

    def is_current(self) -> bool:
        """Whether nothing that the function reaches has changed."""
        if not self.environment.is_current():
            return False
        groups = [[lookup() for lookup in lookups] for lookups in self.primal.lookups]
        found: list[Any] = [values[0] for values in groups]
        if not all(isinstance(value, torch.Tensor) and is_active(value) for value in found):
            return False
        # One tensor may have become two since, or two one.
        if any(other is not values[0] for values in groups for other in values) or len({*map(id, found)}) < len(found):
            return False
        return tuple(map(describe_tensor, found)) == self.lifted and active_among(self.environment) == self.unused

    def changed(self) -> str | None:
        """Return the first state that has changed, as a user would write it; None if it is not known."""
        return self.environment.changed()

    def serves(self) -> None:
        """Count a call."""
        self.calls += 1
        if self.calls <= limits.LIMITS.settled_calls:
            self.traces.note_used(self.calls)

    def may_return(self) -> bool:
        """Whether it may be current again, although it is not now."""
        return self.environment.may_return()

    def engines(self) -> Iterator[Engine]:
        """Iterate over the engines of its functions."""
        return self.primal.engines()

    def requirements(self) -> Requirements | None:
        """Return the state that it depends on besides arguments, with the tensors that it closes over now.

        None where one of these has no strides, by which C++ compares them.
        """
        lookups = [lookup for lookups in self.primal.lookups for lookup in lookups]
        tensors = [*(lookup() for lookup in self.primal.lifted.values()), *self.environment.tensors]
        if any(tensor.layout != torch.strided or tensor.is_nested for tensor in tensors):
            return None
        return Requirements(
            self.environment, tuple(map(CapturedTensor.of, tensors)),
            items=tuple((lookup.container, lookup.key, lookup()) for lookup in lookups if isinstance(lookup, Item)),
            cells=tuple((lookup.cell, lookup()) for lookup in lookups if isinstance(lookup, Variable)),
        )  # fmt: skip

    @property
    def may_be_planned(self) -> bool:
        """Whether plans are of use: the closed-over tensors are not new in each call."""
        return self._replanned <= limits.LIMITS.replans

    def plans_for(self, requirements: Requirements | None) -> list[Planned] | None:
        """Return the list of plans that depend on this state, to add to it; None if there can be none."""
        if requirements is None or self.planned is None or not self.planned[0].has_same_tensors(requirements):
            self.discard_plans()
            self._replanned += 1
            if requirements is None or not self.may_be_planned:
                return None
            self.planned = requirements, []
        return self.planned[1]

    def note_planned_calls(self) -> None:
        """Bring the stamp up to date with the calls that came by native plans."""
        if self.planned is not None:
            self.stamp = max([self.stamp, *(plan.stamp for plan in self.planned[1])])

    def discard_plans(self) -> None:
        """Discard all native plans of such calls."""
        if self.planned is not None:
            self.note_planned_calls()
            self.primal.function.discard_plans(self.planned[1])
            self.planned = None

    def tensors(self, leaves: Sequence[Any], lifted: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return the tensors of a call with these leaves, and the lifted ones, which are looked up if not given."""
        if lifted is None:
            lifted = [lookup() for lookup in self.primal.lifted.values()]
        return [*(leaves[i] for i in self.primal.tensors), *lifted]

    def numbers(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the live numbers of a call with these leaves."""
        return tuple(leaves[index] for index in self.primal.numbers)

    def refusal(self, stack: Sequence[Level], tensors: Sequence[torch.Tensor]) -> str | None:
        """Return why a call below these transforms must run as it is; None if it may be compiled."""
        if Level.OTHER in stack:
            return "a transform of torch.func is active that is neither vmap, grad nor jvp"
        if self.primal.function.function.records and all(tensor.is_cpu for tensor in tensors):
            return ON_CPU
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
        """Note that calls below these transforms fail, if they fail only as operations.

        A derivative decomposes some operations, and ``vmap`` around it then batches the decompositions. Here vmap gets
        the operations themselves, as a call is differentiated last, and it may have no rule for them.

        Raises:
            InlineError: The call failed so; it has changed nothing.
        """
        if _NO_RULE in str(error) and set(stack) != {Level.VMAP} and not self.draws and not self.writes:
            self.refusals[tuple(stack)] = f"torch cannot batch an operation that a derivative would decompose: {error}"
            raise InlineError(self.refusals[tuple(stack)]) from None


_NO_RULE = "Batching rule not implemented"  # torch 2.11 and 2.13


def _saved_tensors_are_changed() -> bool:
    """Whether hooks may change saved tensors; the hooks of checkpoints restore equal ones."""
    hooks = saved_tensors_hooks()
    return hooks is not None and hooks[0].__module__ != torch.utils.checkpoint.__name__


def describe_tensor(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return the properties of a tensor at the current level that a trace depends on."""
    kind = isinstance(tensor, torch.nn.Parameter)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, kind, tensor.requires_grad, is_tracked(tensor))


def active_among(environment: Environment) -> frozenset[int]:
    """Return the ids of the tensors that a function reaches and that are batched or differentiated."""
    return frozenset(id(tensor) for tensor in environment.tensors if is_active(tensor))
