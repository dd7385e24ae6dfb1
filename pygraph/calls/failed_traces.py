"""The failure of a trace, and what it says of later calls of its kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pygraph.calls.function import Call
from pygraph.errors import StateChangeError, TraceError
from pygraph.guards.argument_containers import Change
from pygraph.guards.locations import Item, Location, filled_locations
from pygraph.guards.opened import is_openable
from pygraph.ir.paths import argument_path, flatten_with_path
from pygraph.tracing.function_kinds import Renaming


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of a trace.

    Attributes:
        once: Whether it holds for a single call: what a first one changes (a cache that it fills), a second one may
            leave as it is.
        is_unsteady: Whether calls have added to state twice in a row, so that later ones are traced seldom.
        filled: The locations where nothing was before the call.
        gradients: Whether the call has left other gradients behind.
    """

    once: bool
    is_unsteady: bool
    filled: tuple[Location, ...]
    gradients: bool


def failure_of(error: TraceError, *, is_first: bool, was_once: bool) -> Failure:
    """The consequences of a failed trace for later calls.

    Args:
        error: The failure.
        is_first: Whether there was no call of this kind before.
        was_once: Whether the last call of this kind failed as well, and that held for it alone.
    """
    if not isinstance(error, StateChangeError):
        return Failure(once=is_first and error.may_pass, is_unsteady=False, filled=(), gradients=False)
    once = is_first or adds_again(error, was_once=was_once)
    return Failure(once, error.fills and not once, filled_locations(error), error.gradients)


def adds_again(error: TraceError, *, was_once: bool) -> bool:
    """Whether a function only adds to state, as one does that remembers its results, and not for the second time.

    It may do so for a call of a known kind, as with another attribute.
    """
    return isinstance(error, StateChangeError) and error.fills and not was_once


def of_users(containers: Mapping[str, Change], fn: Any) -> dict[str, Change]:
    """The part of some containers that is among a user's arguments, by its names there.

    Args:
        containers: Containers by their names among the arguments of a function.
        fn: That function, which may stand for the user's.
    """
    path_of = fn.path if isinstance(fn, Renaming) else str
    named = {path_of(name): change for name, change in containers.items()}
    return {name: change for name, change in named.items() if name.startswith(("args[", "kwargs["))}


def changed_objects(error: TraceError, call: Call) -> dict[str, Change]:
    """The objects among the arguments of a call in whose attributes a trace has found numbers to be stored, by name.

    Calls that are passed others each time (meters that a loop makes anew) are of one kind if these are taken apart.
    """
    locations = error.locations or () if isinstance(error, StateChangeError) else ()
    changed = {id(one.container) for one in locations if isinstance(one, Item)}
    keyed, _ = flatten_with_path((call.args, call.kwargs))
    return {
        argument_path(path): Change.CHANGES
        for path, leaf in keyed
        if is_openable(leaf) and id(getattr(leaf, "__dict__", None)) in changed
    }
