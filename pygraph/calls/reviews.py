"""Measuring provisional selections again between later calls, for less than a thousandth of the time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from pygraph.calls import limits
from pygraph.runtime.executable import Executable

_ROUND = 10.0
"""Times of all candidates that a first round is taken to need, with copies of what they update."""


@dataclasses.dataclass
class Reviews:
    """The rounds that are left for the provisional selections of an entry.

    Attributes:
        due: The number of calls of the entry after which the next round runs.
    """

    due: int

    @classmethod
    def of(cls, executable: Executable) -> Reviews | None:
        """The reviews of an executable; None if all its selections are final."""
        if not executable.is_provisional:
            return None
        selections = [one for one in executable.selections.values() if one.provisional is not None]
        spent = sum(one.time for selection in selections for one in selection.compared)
        usual = min(one.time for selection in selections for one in selection.compared)
        return cls(1 + calls_for(_ROUND * spent, usual))

    def is_due(self, calls: int) -> bool:
        """Whether the next round runs in a call after so many."""
        return calls >= self.due

    def run(self, calls: int, round_of: Callable[[], tuple[bool, float]]) -> bool:
        """Run a round, and put the next one off.

        Args:
            calls: The number of calls so far.
            round_of: Runs the round; returns whether a selection has changed, and the microseconds of a call.

        Returns:
            Whether a selection has changed.
        """
        begin = time.perf_counter()
        changed, usual = round_of()
        self.due = calls + calls_for((time.perf_counter() - begin) * 1e6, usual)
        return changed


def calls_for(spent_us: float, call_us: float) -> int:
    """The number of calls, each of so many microseconds, of which a time is the allowed share.

    >>> calls_for(600.0, 60.0)
    10000
    """
    return math.ceil(spent_us / max(call_us, 1.0) / limits.LIMITS.review_share)
