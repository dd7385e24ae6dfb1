"""Kinds of functions that take part in their own tracing: they trace themselves, or set state while they are traced."""

# Functions take and return values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch

from pygraph.guards.environment import Environment
from pygraph.guards.locations import ABSENT, Location
from pygraph.ir.program import Program


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A Program with what its validity depends on.

    Attributes:
        program: The Program.
        static_leaves: Number leaves that were baked in because the trace needed their values.
        environment: What the function could reach when it was traced.
    """

    program: Program
    static_leaves: frozenset[int]
    environment: Environment


class SelfTracing:
    """A function that is traced as part of something else."""

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        """Its Program for these arguments."""
        raise NotImplementedError


class Rebinding:
    """A function that puts other tensors in the place of some that it closes over, which are no part of its trace.

    Attributes:
        __wrapped__: The function that closes over them.
    """

    __wrapped__: Any

    def rebound(self) -> Iterable[torch.Tensor]:
        """What is in those locations now."""
        raise NotImplementedError

    def check(self, program: Program) -> None:
        """Look at the trace.

        Raises:
            TraceError: It reads what is in those locations all the same.
        """


@dataclasses.dataclass(frozen=True)
class Passed:
    """What calls are passed besides their arguments, as they change it.

    Attributes:
        gradients: Whether the gradients of all that is closed over are passed.
        rates: Whether learning rates are.
        locations: Attributes and variables.
    """

    gradients: bool = False
    rates: bool = False
    locations: tuple[Location, ...] = ()

    def __or__(self, other: Passed) -> Passed:
        new = [location for location in other.locations if not any(location.is_same(known) for known in self.locations)]
        return Passed(self.gradients or other.gradients, self.rates or other.rates, (*self.locations, *new))


class Passing:
    """A function that is passed what another one finds for itself, and puts it there while that one is traced.

    Attributes:
        differentiated: The tensors whose gradients are passed.
        groups: The parameter groups whose learning rates are passed.
        locations: Attributes and variables that are passed.
    """

    differentiated: Sequence[torch.Tensor]
    groups: Sequence[dict[str, Any]]
    locations: Sequence[Location]

    @contextlib.contextmanager
    def emptied(self) -> Generator[None, None, None]:
        """Have nothing found in these locations; one that is not there stays so."""
        before = [location.get() for location in self.locations]
        try:
            for location, value in zip(self.locations, before, strict=True):
                if value is not ABSENT:
                    location.put(None)
            yield
        finally:
            for location, value in zip(self.locations, before, strict=True):
                location.put(value)

    def path(self, path: str) -> str:
        """What reports call an argument or a result, in terms of the other function."""
        raise NotImplementedError
