"""Which new kinds of calls are compiled at once: not where kinds seldom come again, as with sizes that depend on data.

A kind of call that is never seen again has cost a trace and a recording for nothing. A function may have a few of
these. Once it has had a few kinds, another one is compiled at once only if the time allows it, of which all functions
together have a small share. Else it runs as it is, and is compiled when it comes again and there is time, or when its
calls have taken as long as that takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterable

from pygraph.calls import limits, retries
from pygraph.calls.entries import Entry
from pygraph.calls.keys import Key
from pygraph.calls.retries import Budget
from pygraph.ir.descriptors import Fallback

SELDOM = Fallback("the call", "kinds of calls seldom come again: a new one runs as it is until it does")
"""Why a call of a new kind is not compiled."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Waiting(Entry):
    """A kind of call that runs as it is for now.

    Attributes:
        took: The seconds that its calls have taken on the host.
    """

    took: float = 0.0

    @contextlib.contextmanager
    def running(self, calls: int = 1) -> Generator[None, None, None]:
        """One of its calls, which stands for so many, as most may run without a lookup that tells their kind."""
        begin = retries.clock()
        yield
        self.took += calls * (retries.clock() - begin)


class NewKinds:
    """The kinds of calls of one function that were compiled, and those that wait.

    Args:
        budget: The time for kinds beyond the first few.
        seldom: Why a call of a new kind is not compiled.
        single: Kinds that are compiled in any case.
        is_patient: Whether these, too, run as they are until they come again.

    Attributes:
        is_patient: That.
    """

    def __init__(
        self, budget: Budget, seldom: Fallback, single: int = limits.LIMITS.single_kinds, *, is_patient: bool = False
    ) -> None:
        self._seldom, self._single, self.is_patient = seldom, single, is_patient
        self._compiled, self._seconds = 0, 0.0
        self._dropped = 0  # of those that came again
        self._waiting = dict[Key, Waiting]()
        self._budget = budget
        self._allowed: Key | None = None  # the kind that is being compiled

    def wait(self, key: Key, entries: Iterable[Entry]) -> Waiting | None:
        """The kind of a call that has no entry, if it is to run as it is; None if it is to be compiled now.

        Args:
            key: The key of the call.
            entries: The entries of all kinds that are kept.
        """
        waiting = self._waiting.get(key)
        if waiting is None and not self._is_allowed_at_once(entries):
            waiting = Waiting(fallbacks=[self._seldom])
            if len(self._waiting) < limits.LIMITS.forms:
                self._waiting[key] = waiting
            return waiting
        is_in_time = self.is_patient and self._compiled < self._single
        if waiting is not None and not (is_in_time or self._budget.allows()) and waiting.took < self._usual_seconds():
            return waiting
        self._allowed = key
        return None

    def _is_allowed_at_once(self, entries: Iterable[Entry]) -> bool:
        """Whether a kind that was not seen before is to be compiled, given the entries of those that are kept."""
        single = self._single
        if self.is_patient:
            return False
        if self._compiled < single:
            return True
        again = self._dropped + sum(entry.calls > 1 for entry in entries)
        return self._compiled - again < single and self._budget.allows()

    def _usual_seconds(self) -> float:
        """The time that compiling a kind takes."""
        return self._seconds / max(self._compiled, 1)

    def note_compiled(self, key: Key, seconds: float) -> None:
        """Note that a kind was compiled, if it is a new one, and the time that it took."""
        if key is not self._allowed:
            return
        self._allowed = None
        self._waiting.pop(key, None)
        if self._compiled >= self._single:
            self._budget.lose(seconds)
        self._compiled += 1
        self._seconds += seconds

    def note_dropped(self, entry: Entry) -> None:
        """Note that an entry is not kept any more."""
        self._dropped += entry.calls > 1

    def clear(self) -> None:
        """Forget everything."""
        self._compiled, self._seconds, self._dropped = 0, 0.0, 0
        self._waiting.clear()
