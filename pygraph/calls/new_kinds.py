"""Which new kinds of calls are compiled at once: not where kinds seldom come again, as with sizes that depend on data.

A kind of call that is never seen again has cost a trace and a recording for nothing. A function may have a few of
these, and a few more the more of its kinds came again. If it has many kinds, they must have been called so often that
another recording hardly matters. Beyond that a new kind runs as it is at first, and is compiled when it comes again,
for a share of the time of all functions together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pygraph.calls import limits
from pygraph.calls.entries import Entry
from pygraph.calls.keys import Key
from pygraph.calls.retries import Budget
from pygraph.ir.descriptors import Fallback

SELDOM = Fallback("the call", "kinds of calls seldom come again: a new one runs as it is until it does")
"""Why a call of a new kind is not compiled."""


class NewKinds:
    """The kinds of calls of one function that were compiled, and those that wait for coming again.

    Args:
        budget: The budget of kinds that have waited.
    """

    def __init__(self, budget: Budget) -> None:
        self._compiled = 0
        self._dropped = self._calls_of_dropped = 0
        self._waiting = set[Key]()
        self._budget = budget
        self._allowed: Key | None = None  # the kind that is being compiled

    def allows(self, key: Key, entries: Iterable[Entry]) -> bool:
        """Whether a kind of call that has no entry is to be compiled now.

        Args:
            key: Its key.
            entries: The entries of all kinds that are kept.
        """
        if not self._is_worth_it([entry.calls for entry in entries]):
            if key not in self._waiting:
                if len(self._waiting) < limits.LIMITS.forms:
                    self._waiting.add(key)
                return False
            if not self._budget.allows():
                return False
        self._allowed = key
        return True

    def _is_worth_it(self, calls: Sequence[int]) -> bool:
        """Whether a new kind is to be compiled at once, given how often those were called that are kept."""
        allowed = limits.LIMITS
        again = self._dropped + sum(one > 1 for one in calls)
        hits = self._calls_of_dropped + sum(calls) - self._compiled
        many = self._compiled - allowed.kinds_at_once
        if many >= 0 and hits < (many + 1) * allowed.hits_for_another:
            return False
        return self._compiled - again < allowed.single_kinds + again // allowed.kinds_for_another

    def note_compiled(self, key: Key, seconds: float) -> None:
        """Note that a kind was compiled, if it is a new one, and the time that it took, if it has waited for that."""
        if key is not self._allowed:
            return
        self._allowed = None
        self._compiled += 1
        if key in self._waiting:
            self._waiting.discard(key)
            self._budget.lose(seconds)

    def note_dropped(self, entry: Entry) -> None:
        """Note that an entry is not kept any more."""
        self._dropped += entry.calls > 1
        self._calls_of_dropped += entry.calls

    def clear(self) -> None:
        """Forget everything."""
        self._compiled = self._dropped = self._calls_of_dropped = 0
        self._waiting.clear()
