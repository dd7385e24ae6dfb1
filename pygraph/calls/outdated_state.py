"""State that a function only reads, and that others change: gradients, learning rates, numbers, tensors in lists."""

from __future__ import annotations

from collections.abc import Sequence

from pygraph.guards.environment import Environment
from pygraph.guards.locations import Location, union
from pygraph.tracing.function_kinds import StateInputs

# Traces that may be outdated by a location before it is an input: a flag or two are cheaper as they are.
_OUTDATED = 2


def outdated_inputs(environments: Sequence[Environment]) -> StateInputs:
    """The state that calls are to take from now on, as it is another one than in traces of such calls.

    Args:
        environments: What each of these traces depends on.
    """
    step = any(not environment.step_is_current() for environment in environments)
    rates = any(not environment.rates_are_current() for environment in environments)
    numbers = [
        (location, _OUTDATED if environment.is_of_optimizer(location) else 1)
        for environment in environments
        for location in environment.changed_numbers()
    ]
    found = [location for environment in environments for location in environment.replaced_containers()]
    return StateInputs(step, rates, numbers=union(_often(numbers), found))


def _often(changes: Sequence[tuple[Location, int]]) -> tuple[Location, ...]:
    """The locations that have changed as often as it takes, each change with its weight: those of an optimizer, of
    which a schedule sets several, when they first do.
    """
    found: list[tuple[Location, int]] = []
    for location, weight in changes:
        known = next((index for index, (other, _) in enumerate(found) if other.is_same(location)), None)
        if known is None:
            found.append((location, weight))
        else:
            found[known] = found[known][0], found[known][1] + weight
    return tuple(location for location, weight in found if weight >= _OUTDATED)
