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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Longer texts are of numbers that a loop computes from each other; they would double in each round.
_LONGEST = 400

NAME = re.compile(r"\bn(\d+)\b")
"""A number in a text."""

NO_NUMBER = "no outcome"
"""The outcome of a comparison that cannot be made, and of one where neither it nor its opposite holds, as of NaN.

Where a comparison cannot be made, the function raises the error, if it comes to it.
"""


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

    def renumbered(self, leaves: Mapping[int, int], known: dict[str, str | None] | None = None) -> NumberUse | None:
        """Return this use, of other leaves; None if it is made of others than those.

        Args:
            leaves: By leaf, what its number is to be.
            known: Texts in this way, to which more are added: each of many uses has those before it.

        >>> NumberUse("n2 % 4", True, (("n3 > 0", True), ("n2 > 0", True))).renumbered({2: 0})
        NumberUse(text='n0 % 4', is_live=True, before=(('n0 > 0', True),))
        """
        known = {} if known is None else known
        for one in (self.text, *(old for old, _ in self.before)):
            if one not in known:
                known[one] = _renumbered(one, leaves)
        text = known[self.text]
        if text is None:
            return None
        before = [(one, outcome) for old, outcome in self.before if (one := known[old]) is not None]
        return NumberUse(text, self.is_live, tuple(before))


def _renumbered(text: str, leaves: Mapping[int, int]) -> str | None:
    if not {int(name) for name in NAME.findall(text)} <= leaves.keys():
        return None
    return NAME.sub(lambda name: f"n{leaves[int(name[1])]}", text)


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
        asked: What it is given.
    """

    def __init__(self, uses: Sequence[NumberUse], asked: object) -> None:
        super().__init__(", ".join(use.text for use in uses))
        self.uses, self.asked = tuple(uses), asked


class NumberTaker:
    """A function in a trace that takes as inputs what it asks of the numbers among its arguments.

    Attributes:
        asked: What it takes.
        leaves: The leaves of what is traced that are its numbers.
    """

    asked: object
    leaves: frozenset[int]

    def wanted(self, missing: Collection[NumberUse]) -> list[NumberUse]:
        """The part of what a trace has asked for that the function can still be given, of its own leaves."""
        raise NotImplementedError


class NumberUses:
    """Questions of one trace about live numbers.

    Attributes:
        asked: Leaves of numbers whose value or text the function asks for.
        missing: What the function asks for that is no input, and the leaves of the arguments that this is made of.
        known: By text, the inputs of the trace; None if it has no such inputs.
        names: By symbol, the text of a number that was passed, or that is computed from such.
        leaves: By symbol, the leaves that it is made of.
        of_symbols: Leaves whose values the trace needs for torch's sake.
    """

    def __init__(self) -> None:
        self.asked: set[int] = set()
        self.missing: dict[NumberUse, frozenset[int]] = {}
        self.known: Mapping[str, Any] | None = None
        self.names: dict[Any, str] = {}
        self.leaves: dict[Any, frozenset[int]] = {}
        self.of_symbols = frozenset[int]()
        self._decided: dict[str, Any] = {}
        self._relied_on: dict[str, frozenset[int]] = {}
        self._before_relying: tuple[tuple[str, Any], ...] = ()
        self._takers: list[NumberTaker] = []  # the inner ones first

    def take(self, taker: NumberTaker, known: Mapping[str, Any]) -> None:
        """Have more be inputs.

        Args:
            taker: The function that takes them.
            known: The inputs, by text.
        """
        self.known = {**(self.known or {}), **known}
        self._takers = [taker, *(one for one in self._takers if one.asked is not taker.asked)]

    def add_symbol(self, symbol: Any, text: str, leaves: frozenset[int]) -> None:
        """Note what a symbol stands for: a text, and the leaves of the arguments that it is made of."""
        self.names[symbol], self.leaves[symbol] = text, leaves

    def leaves_of(self, symbols: Iterable[Any]) -> frozenset[int]:
        """The leaves of the arguments that symbols are made of; other symbols have none."""
        return frozenset[int]().union(*(self.leaves.get(symbol, ()) for symbol in symbols))

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

    def result(self, text: str, leaves: frozenset[int], compute: Callable[[], Any]) -> Any:
        """The result of an operation on numbers; that it raises an error is something by which the function decides.

        Args:
            text: The operation, in Python.
            leaves: The leaves of the arguments that it is made of.
            compute: Does it.
        """
        try:
            return compute()
        except (ArithmeticError, ValueError):
            self.decide(f"({text} is None)", NO_NUMBER, leaves)
            raise

    def derive(self, text: str, value: Any, leaves: frozenset[int]) -> Any:
        """A number that the function computes on the host: an input, or else its value, on which the trace depends."""
        if self.known is not None and text in self.known:
            return self.known[text]
        if not any(use.text == text for use in self.missing):
            self.missing[NumberUse(text, True, tuple(self._decided.items()))] = leaves
        return value

    def rely_on(self, text: str, leaves: frozenset[int]) -> None:
        """Note what is true where a run can do an operation as the trace has done it, without an error."""
        if text not in self._relied_on:
            self._relied_on[text], self._before_relying = leaves, tuple(self._decided.items())

    def join_relied_on(self) -> None:
        """Have all that the trace relies on be one comparison, as there may be many such operations."""
        if self._relied_on:
            leaves = frozenset[int]().union(*self._relied_on.values())
            self.note_guard(" and ".join(self._relied_on), leaves, self._before_relying)

    def note_guard(self, text: str, leaves: frozenset[int], before: tuple[tuple[str, Any], ...] = ()) -> None:
        """Note comparisons that nothing in the function asks for, as one, unless they are an input.

        Args:
            text: The comparisons.
            leaves: The leaves of the arguments that they are made of.
            before: The decisions before them, and what came out.
        """
        if self.known is None or text not in self.known:
            self.missing.setdefault(NumberUse(text, False, before), leaves)

    def comparisons(self) -> list[str]:
        """The texts of comparisons that are no inputs."""
        outcomes = {text for text, value in self._decided.items() if type(value) is bool}  # to which 0 and 1 are equal
        found = [use.text for use in self.missing if not use.is_live]
        return [text for text in found if text not in self._decided or text in outcomes]

    def needed(self, taken: Collection[str] = ()) -> frozenset[int]:
        """The leaves of all that is asked for and is no input, but for some texts."""
        return frozenset[int]().union(*(leaves for use, leaves in self.missing.items() if use.text not in taken))

    def check_missing(self) -> None:
        """End a trace whose function can be given more of what it asks for.

        Raises:
            MissingNumbersError: It can.
        """
        useful = [use for use, leaves in self.missing.items() if leaves - self.asked - self.of_symbols]
        for taker in self._takers:
            wanted = taker.wanted(useful)
            if wanted:
                raise MissingNumbersError(wanted, taker.asked)

    def summary(self) -> UsedNumbers | None:
        """All that calls can compute, and that no function takes; None if that would make no leaf live."""
        taken = frozenset[int]().union(*(taker.leaves for taker in self._takers))
        explained = self.needed() - self.asked - self.of_symbols - taken
        uses = tuple(use for use in self.missing if use.leaves() & explained)
        return UsedNumbers(uses, explained) if uses else None


def constant_text(value: Any) -> str | None:
    """A constant in Python; None if it has no text by which it is exactly itself."""
    if type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return f"({value!r})" if value < 0 else repr(value)
    if type(value) is np.float64 and math.isfinite(value):
        return f"np.float64({float(value)!r})"
    return None


def is_short(text: str) -> bool:
    """Whether a text is one of a few operations."""
    return len(text) <= _LONGEST
