"""Questions of a traced function about its live numbers: comparisons, and numbers that it computes on the host.

Each is a text of Python in the caller's numbers, ``n0`` for the first leaf of the arguments, as ``(n0 % 4) == 0`` or
``math.sqrt(n0)``. It has the operations that the function has done, in its order, so that it gives exactly what the
function gets, whatever the numbers are. A call can compute it before its graphs run: the outcome of a comparison is
part of the call's key, and a computed number is an input as a number that the caller passes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

# Longer texts are of numbers that a loop computes from each other; they would double in each round.
_LONGEST = 400

NAME = re.compile(r"\bn(\d+)\b")
"""A number in a text."""


@dataclasses.dataclass(frozen=True)
class NumberUse:
    """A comparison, or a number that is computed on the host.

    Attributes:
        text: It, in Python.
        is_live: Whether the trace reads it as an input, and not as a value by which the function decides.
        before: The decisions before it, and what came out: it is only made where these come out in the same way.
    """

    text: str
    is_live: bool
    before: tuple[tuple[str, Any], ...] = ()

    def leaves(self) -> frozenset[int]:
        """The leaves of the numbers that it is made of."""
        return frozenset(int(name[1]) for name in NAME.finditer(self.text))


@dataclasses.dataclass(frozen=True)
class UsedNumbers:
    """Questions of one trace that calls can answer before.

    Attributes:
        uses: All that calls can compute.
        explained: The leaves of numbers whose values a trace needs for nothing else.
    """

    uses: tuple[NumberUse, ...]
    explained: frozenset[int]


class MissingNumbersError(Exception):
    """A function that takes what it asks of numbers as inputs asks for more.

    Args:
        uses: What it asks for, and is not given.
    """

    def __init__(self, uses: Sequence[NumberUse]) -> None:
        super().__init__(", ".join(use.text for use in uses))
        self.uses = tuple(uses)


class NumberUses:
    """Questions of one trace about live numbers.

    Attributes:
        asked: Leaves of numbers whose value or text the function asks for.
        missing: What the function asks for that is no input, and the leaves of the arguments that this is made of.
        known: By text, the inputs of the trace; None if it has no such inputs.
        wanted: Tells what of all that is missing the function can be given; None if it cannot be given anything.
        names: By symbol, the text that stands for a number that was passed.
        of_symbols: Leaves whose values the trace needs for torch's sake.
    """

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.missing: dict[NumberUse, frozenset[int]] = {}
        self.known: Mapping[str, Any] | None = None
        self.wanted: Callable[[Sequence[NumberUse]], list[NumberUse]] | None = None
        self.names: dict[Any, str] = {}
        self.of_symbols = frozenset[int]()
        self._decided: dict[str, Any] = {}

    def decide(self, text: str, value: Any, leaves: frozenset[int]) -> Any:
        """Note that the function decides by a value.

        Args:
            text: The value, in Python.
            value: What it is in this call.
            leaves: The leaves of the arguments that it is made of.
        """
        if text not in self._decided:
            if self.known is None or text not in self.known:
                self.missing[NumberUse(text, False, tuple(self._decided.items()))] = leaves
            self._decided[text] = value
        return value

    def derive(self, text: str, value: Any, leaves: frozenset[int]) -> Any:
        """A number that the function computes on the host: an input, or else its value, on which the trace depends."""
        if self.known is not None and text in self.known:
            return self.known[text]
        if not any(use.text == text for use in self.missing):
            self.missing[NumberUse(text, True, tuple(self._decided.items()))] = leaves
        return value

    def note_guard(self, text: str, leaves: frozenset[int]) -> None:
        """Note the comparisons that torch has made, of the same numbers, unless they are an input."""
        if self.known is None or text not in self.known:
            self.missing.setdefault(NumberUse(text, False), leaves)

    def comparisons(self) -> list[str]:
        """The texts of comparisons that are no inputs."""
        return [
            use.text for use in self.missing if not use.is_live and self._decided.get(use.text) in (None, False, True)
        ]

    def needed(self, taken: Collection[str] = ()) -> frozenset[int]:
        """The leaves of all that is asked for and is no input, but for some texts."""
        return frozenset[int]().union(*(leaves for use, leaves in self.missing.items() if use.text not in taken))

    def check_missing(self) -> None:
        """End a trace whose function can be given more of what it asks for.

        Raises:
            MissingNumbersError: It can.
        """
        if self.wanted is None:
            return
        useful = [use for use, leaves in self.missing.items() if leaves - self.asked - self.of_symbols]
        wanted = self.wanted(useful)
        if wanted:
            raise MissingNumbersError(wanted)

    def summary(self) -> UsedNumbers | None:
        """All that calls can compute; None if that would make no leaf live."""
        if self.known is not None:
            return None
        explained = self.needed() - self.asked - self.of_symbols
        uses = tuple(use for use in self.missing if use.leaves() & explained)
        return UsedNumbers(uses, explained) if uses else None


def of_leaves_from(first: int, uses: Sequence[NumberUse]) -> list[NumberUse]:
    """Uses of leaves from a first one on, as of arguments that begin there.

    Args:
        first: The first leaf of these arguments.
        uses: All uses.
    """

    def moved(text: str) -> str:
        return NAME.sub(lambda name: f"n{int(name[1]) - first}", text)

    def is_among(text: str) -> bool:
        return all(int(name) >= first for name in NAME.findall(text))

    return [
        NumberUse(moved(use.text), use.is_live, tuple((moved(text), out) for text, out in use.before if is_among(text)))
        for use in uses
        if is_among(use.text)
    ]


def constant_text(value: Any) -> str | None:
    """A constant in Python; None if it has no text by which it is exactly itself."""
    if type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return f"({value!r})" if value < 0 else repr(value)
    return None


def is_short(text: str) -> bool:
    """Whether a text is one of a few operations."""
    return len(text) <= _LONGEST
