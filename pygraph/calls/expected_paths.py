"""The way that a call is expected to go, of a function that decides by values on the device."""

from __future__ import annotations

from collections.abc import Set
from typing import TypeAlias

Path: TypeAlias = tuple[str, ...]
"""The answers to a call's questions, as texts."""


class ExpectedPaths:
    """Guesses from the way that the last call has gone how the next one goes.

    What follows a way is what has followed it before: a scaler that skips a step goes on as before, and accumulation
    over two steps takes turns. One exception does not change what is expected, two in a row do.

    Args:
        most: As many ways are remembered, those that came last.

    Example:
        >>> paths = ExpectedPaths(most=8)
        >>> for _ in range(2):
        ...     paths.note(("True",))
        ...     paths.note(("False",))
        >>> paths.expected(), paths.beginning_with(()), paths.beginning_with(("3",))
        (('True',), ('False',), None)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[Path, None] = {}  # the last one last
        self._next: dict[Path, tuple[Path, bool]] = {}  # what follows each, and whether it did the last time
        self._last: Path | None = None
        self._steady: Path | None = None  # the one that came twice in a row last

    def __len__(self) -> int:
        return len(self._known)

    def expected(self) -> Path | None:
        """The way that the next call is expected to go; None before the first one."""
        if self._last is None:
            return None
        if self._last in self._next:
            return self._next[self._last][0]
        return self._last if self._steady is None else self._steady

    def beginning_with(self, begin: Path, but: Set[Path] = frozenset()) -> Path | None:
        """The way that came last of those that begin so; None if there is none.

        Args:
            begin: Its first answers.
            but: Ways that do not count.
        """
        found = (path for path in reversed(self._known) if path[: len(begin)] == begin and path not in but)
        return next(found, None)

    def note(self, path: Path) -> None:
        """Note the way that a call has gone."""
        last, self._last = self._last, path
        self._known.pop(path, None)
        self._known[path] = None
        if len(self._known) > self._most:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._next.pop(oldest, None)
        if last == path:
            self._steady = path
        if last is None:
            return
        expected, was_right = self._next.get(last, (path, False))
        if expected == path:
            self._next[last] = (path, True)
        else:
            self._next[last] = (expected, False) if was_right else (path, False)
