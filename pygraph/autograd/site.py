"""One kind of call of a function inside a transform or under autograd: the function of its tensors, and its limits."""

# Arguments are of any type, and fakes and torch.func's stack have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from pygraph.autograd.flat import Primal
from pygraph.autograd.levels import (
    Level,
    ambient,
    batching_levels,
    is_batched,
    is_special,
    is_tracked,
    saved_tensors_hooks,
)
from pygraph.calls import retries
from pygraph.calls.engine import Engine
from pygraph.calls.plan_description import Reached
from pygraph.calls.retries import Traces
from pygraph.calls.surroundings import NOTHING_ON_DEVICE, InlineError
from pygraph.guards.environment import Environment
from pygraph.guards.locations import Item, Location, Variable

# So often other tensors may be where those were that a plan guards; a function that sees others each time has no plan.
_MAX_REPLANNED = 8


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

    def engines(self) -> Iterator[Engine]:
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
        return tuple(map(describe_tensor, found)) == self.lifted and special_among(self.environment) == self.unused

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

    def engines(self) -> Iterator[Engine]:
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
        if self.primal.function.function.records and all(tensor.is_cpu for tensor in tensors):
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


def describe_tensor(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What a trace depends on of a tensor as it is at the current level."""
    kind = isinstance(tensor, torch.nn.Parameter)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, kind, tensor.requires_grad, is_tracked(tensor))


def special_among(environment: Environment) -> frozenset[int]:
    """The ids of the tensors that a function reaches and that carry gradients or batches."""
    return frozenset(id(tensor) for tensor in environment.tensors if is_special(tensor))
