"""Kinds of functions that take part in their own tracing: they trace themselves, or set state meanwhile."""

# Functions take and return values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Any

import torch

from pygraph.guards.environment import Environment
from pygraph.guards.growth import Growth
from pygraph.guards.locations import Items, Location, RequiresGrad, union
from pygraph.ir.program import Program
from pygraph.tracing.number_conditions import Comparison, Condition
from pygraph.tracing.number_uses import UsedNumbers


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A Program with what its validity depends on.

    Attributes:
        program: The Program.
        static_leaves: Number leaves that were baked in because the trace needed their values.
        environment: What the function could reach when it was traced.
        used: What the function asks of numbers; None if it is nothing that calls can compute.
    """

    program: Program
    static_leaves: frozenset[int]
    environment: Environment
    used: UsedNumbers | None = None


class SelfTracing:
    """A function that has its own way of being traced."""

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        """Trace the function for these arguments."""
        raise NotImplementedError


class Rebinding:
    """A function that calls another one with some of its closed-over tensors replaced by its own arguments.

    The replaced tensors are no part of its trace.

    Attributes:
        __wrapped__: The function that closes over them.
    """

    __wrapped__: Any

    def rebound(self) -> Iterable[torch.Tensor]:
        """The tensors that are replaced, as the other function finds them now."""
        raise NotImplementedError

    def check(self, program: Program) -> None:
        """Check the trace.

        Raises:
            TraceError: It reads a tensor that is replaced all the same.
        """


@dataclasses.dataclass(frozen=True)
class StateInputs:
    """State that calls take as inputs besides their arguments, since it changes from call to call.

    Attributes:
        gradients: Whether the gradients of all closed-over tensors are inputs.
        learning_rates: Whether the learning rates of optimizers are inputs.
        numbers: Other attributes and variables that are numbers, or containers of tensors, which calls read and do not
            change.
        locations: The attributes and variables whose values are inputs, and results.
        conditions: Comparisons of such numbers, or of arguments, whose outcomes are inputs.
        thawed: Flags of tensors that calls have require grad, though they need not before: their gradients count.
        decisions: Whether calls decide by values on the device, and take the answers as inputs.
        numbers_of_device: Whether these are numbers too, and not only outcomes of conditions.
    """

    gradients: bool = False
    learning_rates: bool = False
    numbers: tuple[Location, ...] = ()
    locations: tuple[Location, ...] = ()
    conditions: tuple[Condition, ...] = ()
    thawed: tuple[RequiresGrad, ...] = ()
    decisions: bool = False
    numbers_of_device: bool = False

    def __or__(self, other: StateInputs) -> StateInputs:
        return StateInputs(
            self.gradients or other.gradients,
            self.learning_rates or other.learning_rates,
            union(self.numbers, other.numbers),
            _without_ends(union(self.locations, other.locations)),
            union(self.conditions, other.conditions),
            union(self.thawed, other.thawed),
            self.decisions or other.decisions,
            self.numbers_of_device or other.numbers_of_device,
        )


def _without_ends(locations: Sequence[Location]) -> tuple[Location, ...]:
    """Locations without the ends of lists of which all items are among them."""
    every = [one for one in locations if isinstance(one, Items)]
    return tuple(one for one in locations if not (isinstance(one, Growth) and any(map(one.is_end_of, every))))


class Renaming:
    """A function whose arguments and results have other names in reports than their positions give them."""

    def path(self, path: str) -> str:
        """The name that reports give to an argument or a result of this function."""
        raise NotImplementedError


class WithStateInputs(Renaming):
    """A function that takes state as inputs, and stores it where another function reads it while that one is traced.

    Attributes:
        differentiated: The tensors whose gradients are inputs.
        numbers: The attributes and variables that are numbers, and inputs: learning rates and others.
        locations: The attributes and variables whose values are inputs, and results.
    """

    differentiated: Sequence[torch.Tensor]
    numbers: Sequence[Location]
    locations: Sequence[Location]

    @contextlib.contextmanager
    def locations_emptied(self) -> Generator[None, None, None]:
        """Hide what the locations hold from guards for the time of the context; one that does not exist stays so."""
        with contextlib.ExitStack() as stack:
            for location in self.locations:
                stack.callback(location.hide())
            yield

    def taken(
        self, comparisons: Sequence[Comparison], needed: Sequence[str], read: Sequence[torch.Tensor]
    ) -> Collection[Comparison]:
        """The comparisons in a trace whose outcomes are inputs.

        Args:
            comparisons: All that could be.
            needed: The paths of arguments whose values the trace needs all the same.
            read: The closed-over tensors whose gradients it reads.

        Raises:
            Exception: There are more that should be, or other state is, so that the trace is of no use.
        """
        raise NotImplementedError
