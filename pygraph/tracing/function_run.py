"""The run of a function that is traced: what it has returned and changed, when all of that is put back."""

from __future__ import annotations

import dataclasses

from torch import fx

from pygraph.errors import GradientChangeError, StateChangeError, describe
from pygraph.guards.locations import ABSENT, Location, RequiresGrad
from pygraph.tracing.results import Results


@dataclasses.dataclass
class FunctionRun:
    """The outcome of a function's run, when all that it has changed is put back.

    Attributes:
        module: The graph; None if the function has failed.
        results: The values that it has returned; None if it has failed.
        failure: The error that has ended the run.
        changed: The first lasting change that it has made, in words; None if there is none.
        locations: The locations of all such changes, if all are of attributes and variables.
        remembers: Whether a function with a cache has come to remember an object.
        gradient: The ``.grad`` that it has changed, in words.
        thawed: Flags of tensors whose ``.grad`` it has changed, though they do not require grad before.
        seeded: The random generator that it has moved.
        caught: The error that only a trace raises and that it has caught, in words.
    """

    module: fx.GraphModule | None
    results: Results | None
    failure: Exception | SystemExit | None
    changed: str | None
    locations: tuple[Location, ...] | None
    remembers: bool
    gradient: str | None
    thawed: tuple[RequiresGrad, ...]
    seeded: str | None
    caught: str | None

    def state_change_error(self, call: str) -> StateChangeError | GradientChangeError:
        """The error of a call that has changed what outlasts it; ``call`` is what errors call it."""
        kind = GradientChangeError if self.changed is None else StateChangeError
        error = kind(
            describe(call, f"it changes {self.changed or self.gradient}",
                     expected="no lasting change but to tensors in place", remedy="Return the new value instead.")
        )  # fmt: skip
        error.locations = self.locations
        error.gradients, error.thawed = self.gradient is not None, self.thawed
        is_filled = bool(self.locations) and all(location.get() is ABSENT for location in self.locations or ())
        error.fills = self.remembers or is_filled
        return error
