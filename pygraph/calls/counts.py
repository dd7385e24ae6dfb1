"""Counts of a user's calls: each once, whatever runs inside of it and by whatever path it comes."""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol


class CallCounts(NamedTuple):
    """The calls of a function.

    Attributes:
        hits: Those that found what they run.
        misses: Those in which something was compiled, or looked at to be compiled; for their backward, too.
        as_they_are: Those that ran as they are without that.
    """

    hits: int
    misses: int
    as_they_are: int


class Path(Protocol):
    """The native plans of a function."""

    def every_unsettled(self) -> int:
        """The number of calls that they have served and that are not settled yet."""
        ...


class Counts:
    """Calls and captures of a function and of all that is derived from it.

    Attributes:
        captures: Graphs that were recorded.
        evictions: Kinds of calls that made room for others.
        compilations: Compilations of all of them, of which one call may make several.
        traces: The calls among these that were traced, or recorded anew as tensors have moved.
        calls: The user's calls, without those that native plans have served and that are not settled yet.
        skipped: Those that ran as they are without a lookup.
        paths: The native plans of the functions that users call.
    """

    def __init__(self) -> None:
        self.paths = weakref.WeakSet[Path]()
        self.reset()

    def reset(self) -> None:
        """Count from zero again."""
        self.captures = self.evictions = self.compilations = self.traces = self.calls = self.skipped = 0
        self._missed = self._as_they_are = 0
        self._last_missed = self._last_as_it_is = -1  # the number of the call

    def note_compilation(self) -> None:
        """Note that something is compiled."""
        self.compilations += 1
        now = self._now()
        if self._last_missed == now:
            return
        self._missed += 1
        self._last_missed = now
        if self._last_as_it_is == now:
            self._as_they_are -= 1

    def note_as_it_is(self) -> None:
        """Note that the current call runs as it is."""
        now = self._now()
        if now not in (self._last_missed, self._last_as_it_is):
            self._as_they_are += 1
            self._last_as_it_is = now

    def _now(self) -> int:
        """The number of the current call."""
        return self.calls + sum(path.every_unsettled() for path in list(self.paths))

    def of_calls(self) -> CallCounts:
        """The user's calls so far."""
        as_they_are = self._as_they_are + self.skipped
        return CallCounts(max(self._now() - self._missed - as_they_are, 0), self._missed, as_they_are)
