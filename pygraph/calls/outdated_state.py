"""State that a function only reads, and that changes between its calls: gradients, learning rates and other numbers."""

from __future__ import annotations

from collections.abc import Sequence

from pygraph.guards.environment import Environment
from pygraph.guards.locations import Location
from pygraph.tracing.function_kinds import StateInputs

# Traces that may each have another value of a number before it is an input: a flag or two are cheaper as they are.
_VALUES = 2


def outdated_inputs(environments: Sequence[Environment]) -> StateInputs:
    """The state that calls are to take from now on, as it is another one than in traces of such calls.

    Args:
        environments: What each of these traces depends on.
    """
    step = any(not environment.step_is_current() for environment in environments)
    rates = any(not environment.rates_are_current() for environment in environments)
    return StateInputs(gradients=step, learning_rates=rates, numbers=_changed_numbers(environments))


def _changed_numbers(environments: Sequence[Environment]) -> tuple[Location, ...]:
    """The numbers that have changed as often as it takes; those of an optimizer, of which a schedule sets several,
    when they first do.
    """
    found: list[tuple[Location, int]] = []
    for environment in environments:
        for location in environment.changed_numbers():
            weight = _VALUES if environment.is_of_optimizer(location) else 1
            known = next((index for index, (other, _) in enumerate(found) if other.is_same(location)), None)
            if known is None:
                found.append((location, weight))
            else:
                found[known] = found[known][0], found[known][1] + weight
    return tuple(location for location, weight in found if weight >= _VALUES)
