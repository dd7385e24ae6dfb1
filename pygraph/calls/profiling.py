"""Kernel times of kinds of calls: ``explain(profile=True)`` asks for them, and the next call of each kind measures."""

from __future__ import annotations

from typing import Any

from pygraph.calls.cache import Cache
from pygraph.calls.entries import Recorded
from pygraph.errors import CaptureError
from pygraph.ir.source_lines import first_line
from pygraph.process.collection import collection_postponed
from pygraph.report.profile import Profile
from pygraph.runtime.profiling import can_profile, profile_call

NEXT_CALL = "the next call of this kind measures it: call the function, then explain(profile=True) again"


def ask(entry: Recorded) -> None:
    """Have the next call of a kind measured that has not been measured yet, or not with success."""
    if not isinstance(entry.profile, Profile):
        entry.profile, entry.wants_profile = entry.profile or NEXT_CALL, True


def ask_for_all(cache: Cache) -> None:
    """Have the next call of each kind in a cache measured that has not been measured yet."""
    for entry in cache.entries:
        if isinstance(entry, Recorded):
            ask(entry)
            if entry.wants_profile:
                cache.native.renew(entry)


def measure(entry: Recorded, leaves: list[Any]) -> None:
    """Measure the kernels of a call that has been asked for, unless another profiler is at work.

    Args:
        entry: The entry of the call.
        leaves: The leaves of ``(args, kwargs)`` of the call, which are afterwards as they were.
    """
    if not can_profile():
        return
    entry.wants_profile = False
    try:
        with entry.graphs.driver.unwatched(), collection_postponed():
            entry.profile = profile_call(entry.graphs, leaves)
    except (RuntimeError, CaptureError) as error:  # no memory for copies, or torch's profiler does not start
        entry.profile = f"it could not be measured: {first_line(error)}"
