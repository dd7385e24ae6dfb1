"""Questions of a function about numbers, as inputs: outcomes of comparisons, and numbers that it computes.

``step % 100 == 0`` is computed before the call, and is part of its key; ``math.sqrt(k)`` is computed before the call,
and read as a number that the caller passes. So the trace is good for all numbers of which the outcomes are the same.

An optimizer has a step counter for each parameter, and all have the same value. That they have is a comparison as well,
and what is computed of one of them is then computed once.
"""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from pygraph.calls import limits
from pygraph.calls.function import CONDITION
from pygraph.guards.opened import is_of_opened
from pygraph.ir.paths import argument_path, flatten_with_path
from pygraph.tracing.live_numbers import Live
from pygraph.tracing.number_conditions import NAMES, NO_OUTCOME
from pygraph.tracing.number_uses import NAME, NO_NUMBER, NumberTaker, NumberUse


class Leaves(NamedTuple):
    """The leaves of a call's arguments.

    Attributes:
        paths: Their paths, as reports call them.
        reads: What reads each from ``args`` and ``kwargs``, in Python; None where nothing does.
    """

    paths: tuple[str, ...]
    reads: tuple[str | None, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Leaves:
        """The leaves of the arguments of a call."""
        keyed, _ = flatten_with_path((args, kwargs))
        seen, reads = collections.Counter[pytree.KeyPath](), list[str | None]()
        for path, _ in keyed:
            inside = path[:-1]  # an object that is taken apart has its leaves in one list
            reads.append(_read(inside, seen[inside]) if is_of_opened(path[-1]) else _read(path))
            seen[inside] += 1
        return cls(tuple(argument_path(path) for path, _ in keyed), tuple(reads))

    def can_compute(self, use: NumberUse) -> bool:
        """Whether something that a function asks of numbers can be computed of these leaves."""
        return all(leaf < len(self.reads) and self.reads[leaf] is not None for leaf in use.leaves())


def _read(path: pytree.KeyPath, position: int | None = None) -> str | None:
    first, *rest = path
    text = ("args", "kwargs")[first.idx]  # pyright: ignore[reportAttributeAccessIssue]
    for entry in rest:
        key = entry.idx if isinstance(entry, pytree.SequenceKey) else getattr(entry, "key", None)
        if not isinstance(entry, (pytree.SequenceKey, pytree.MappingKey)) or type(key) not in (int, str):
            return None
        text += f"[{key!r}]"
    return text if position is None else f"{text}.values[{position}]"


class AskedNumbers:
    """Questions of a function about the numbers among its arguments, whose answers it is passed in a list of its own.

    Args:
        leaves: The leaves of its arguments, but for that list.

    Attributes:
        uses: What it asks for.
    """

    def __init__(self, leaves: Leaves) -> None:
        self.uses: tuple[NumberUse, ...] = ()
        self._leaves = leaves
        self.groups: dict[str, tuple[int, ...]] = {}  # by the comparison that they are equal, leaves that have been
        self._compute: _Computer | None = None

    def ask(self, uses: Sequence[NumberUse], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Have the function be passed what it asks for at first; False if there is nothing that it can be passed.

        Args:
            uses: What it asks for.
            args: Its arguments in a call.
            kwargs: Its keyword arguments.
        """
        most = limits.LIMITS.asked_numbers
        if not self.uses and max(sum(use.is_live == live for use in uses) for live in (True, False)) > most:
            groups = _equal_counters(uses, pytree.tree_leaves((args, kwargs)))
            self.groups = {f"({' == '.join(f'n{leaf}' for leaf in leaves)})": leaves for leaves in groups}
            names = {leaf: leaf for leaf in range(len(self._leaves.paths))}
            names.update({leaf: leaves[0] for leaves in groups for leaf in leaves})
            known: dict[str, str | None] = {}
            renamed = [use.renumbered(names, known) or use for use in uses]
            first = {(use.text, use.is_live): use for use in reversed(renamed)}  # others come after more decisions
            uses = [*(NumberUse(text, False) for text in self.groups), *reversed(first.values())]
        return self.give(uses)

    def give(self, uses: Sequence[NumberUse]) -> bool:
        """Have the function be passed more of what it asks for; False if there is nothing that it can be passed."""
        more = self.wanted(uses)
        self.uses = (*self.uses, *more)
        self._compute = _computer_of(self.uses, self._leaves.reads) if self.uses else None
        return bool(more)

    def wanted(self, missing: Collection[NumberUse]) -> list[NumberUse]:
        """The part of what a trace has asked for that the function can still be given."""
        new = [use for use in missing if use not in self.uses and self._leaves.can_compute(use)]
        most, held = limits.LIMITS.asked_numbers, [use.is_live for use in self.uses]
        decisions = [use for use in new if not use.is_live][: most - held.count(False)]
        numbers = [use for use in new if use.is_live][: most - held.count(True)]
        return [use for use in new if use in decisions or use in numbers]

    def are_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether arguments have the leaves of those that the function was asked about."""
        return Leaves.of(args, kwargs) == self._leaves

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The list that the function is passed in a call; empty if it asks for nothing."""
        return [] if self._compute is None else self._compute(args, kwargs)

    @contextlib.contextmanager
    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[Any]) -> Generator[None, None, None]:
        """Have what is traced meanwhile read the list, where it asks for what is in it.

        Args:
            args: The arguments of the function that is traced.
            kwargs: Its keyword arguments.
            found: The list.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        numbers = [leaf for leaf in (*leaves, *found) if isinstance(leaf, Live)]
        if not numbers or not self.uses:  # none is live, or this is no trace
            yield
            return
        uses, taker = numbers[0].uses, _Taker(self, leaves, found)
        outer = uses.known or {}
        uses.take(taker, taker.known)
        try:
            yield
        finally:
            # Later on, only texts are compared; the numbers must not outlive the trace.
            uses.known = {**dict.fromkeys(uses.known or ()), **outer}

    def are_equal(self, found: Sequence[Any]) -> bool:
        """Whether numbers that have been equal are so in a call with these answers."""
        return all(
            value is True
            for use, value in zip(self.uses, _by_use(self.uses, found), strict=True)
            if use.text in self.groups
        )

    def deciding(self, found: Sequence[Any]) -> str | None:
        """The path of a number whose value decides what the function does, and not the outcome of a comparison."""
        decisions = zip((use for use in self.uses if not use.is_live), found, strict=False)
        texts = (use for use, value in decisions if type(value) in (int, float))
        return next((self._leaves.paths[leaf] for use in texts for leaf in use.leaves()), None)

    def name_of(self, slot: int, name_of_leaf: Callable[[str], str]) -> str:
        """The name that reports give to an item of the list; none for what is not used.

        Args:
            slot: The position of the item.
            name_of_leaf: Gives the name of a number among the arguments by its path.
        """
        most = limits.LIMITS.asked_numbers
        used = [use for use in self.uses if use.is_live == (slot >= most)]
        if slot % most >= len(used):
            return ""
        if slot < most:
            return CONDITION
        return NAME.sub(lambda name: name_of_leaf(self._leaves.paths[int(name[1])]), used[slot % most].text)


def decision_slots() -> range:
    """The positions of decisions in the list that a function is passed; behind them are computed numbers."""
    return range(limits.LIMITS.asked_numbers)


def _by_use(uses: Sequence[NumberUse], found: Sequence[Any]) -> list[Any]:
    """The items of that list in the order of what the function asks for."""
    half = limits.LIMITS.asked_numbers
    decisions, numbers = iter(found[:half]), iter(found[half:])
    return [next(numbers if use.is_live else decisions) for use in uses]


def _name(number: Any, text: str) -> None:
    """Give a live number of a trace the text that stands for it."""
    if isinstance(number, Live) and number.source is not None:
        node: Any = number.node  # pyright: ignore[reportAttributeAccessIssue]
        number.source = dataclasses.replace(number.source, text=text)
        number.uses.names[node.expr] = text


def _equal_counters(uses: Sequence[NumberUse], leaves: Sequence[Any]) -> list[tuple[int, ...]]:
    """The leaves of integers that are asked about, several that are equal each."""
    found: dict[int, list[int]] = {}
    for leaf in sorted(frozenset[int]().union(*(use.leaves() for use in uses))):
        if leaf < len(leaves) and type(leaves[leaf]) is int:
            found.setdefault(leaves[leaf], []).append(leaf)
    return [tuple(same) for same in found.values() if len(same) > 1]


class _Taker(NumberTaker):
    """A function that is passed answers, in one trace, in which these may be other leaves than of the function.

    Args:
        asked: What it asks.
        leaves: The leaves of its arguments in the trace.
        found: The answers.

    Attributes:
        known: Outcomes and numbers that the function is given, by text of what is traced.
    """

    def __init__(self, asked: AskedNumbers, leaves: Sequence[Any], found: Sequence[Any]) -> None:
        self.asked = self._asked = asked
        self._there: dict[int, int] = {}  # by leaf of the function, the leaf of what is traced
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Live) and leaf.source is not None and leaf.source.is_passed:
                (self._there[index],) = leaf.source.leaves
        self._here = {there: index for index, there in self._there.items()}
        self.leaves = frozenset(self._here)
        self.known: dict[str, Any] = {}
        for use, value in zip(asked.uses, _by_use(asked.uses, found), strict=True):
            there = use.renumbered(self._there)
            if value is None or there is None:
                continue
            self.known[there.text] = value
            _name(value, there.text)
            if value is True and use.text in asked.groups:
                self._take_for_one(asked.groups[use.text], leaves)

    def _take_for_one(self, equal: tuple[int, ...], leaves: Sequence[Any]) -> None:
        for leaf in equal:
            _name(leaves[leaf], f"n{self._there[equal[0]]}")
            self._here[self._there[leaf]] = equal[0]

    def wanted(self, missing: Collection[NumberUse]) -> list[NumberUse]:
        """The part of what a trace has asked for that the function can still be given, of its own leaves."""
        known: dict[str, str | None] = {}
        here = (use.renumbered(self._here, known) for use in missing)
        return self._asked.wanted([use for use in here if use is not None])


_Computer = Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]
"""Computes, of the arguments of a call, the list that a function is passed."""


def _computer_of(uses: Sequence[NumberUse], reads: Sequence[str | None]) -> _Computer:
    """A function that computes the list that a function is passed.

    Args:
        uses: What the function asks for.
        reads: What reads each leaf of the arguments.
    """
    names: dict[str, Any] = {**NAMES, "errors": NO_OUTCOME, "no_number": NO_NUMBER}
    leaves = sorted(frozenset[int]().union(*(use.leaves() for use in uses)))
    lines = [
        "def compute(args, kwargs):",
        "    try:",
        *(f"        n{leaf} = {reads[leaf]}" for leaf in leaves),
        "        pass",
        "    except errors:  # arguments of another structure, of which nothing is asked",
        f"        return [None] * {2 * limits.LIMITS.asked_numbers}",
    ]
    at: dict[str, list[int]] = {}
    for index, use in enumerate(uses):
        conditions = []
        for number, (text, outcome) in enumerate(use.before):
            names[f"o{index}_{number}"] = outcome
            ways = [f"u{one} == o{index}_{number}" for one in at.get(text, ())]
            conditions += [f"({' or '.join(ways)})"] if ways else []
        lines += [
            f"    u{index} = None",
            f"    if {' and '.join(conditions) or True}:",
            "        try:",
            f"            u{index} = {use.text}",
            f"            if u{index} is None: u{index} = no_number",
            "        except errors:",
            f"            u{index} = no_number",
        ]
        at.setdefault(use.text, []).append(index)
    lines.append(f"    return [{', '.join(_slots(uses))}]")
    exec("\n".join(lines), names)  # of texts that traces have written
    return names["compute"]


def _slots(uses: Sequence[NumberUse]) -> list[str]:
    most = limits.LIMITS.asked_numbers
    decisions = [f"u{index}" for index, use in enumerate(uses) if not use.is_live]
    numbers = [f"u{index}" for index, use in enumerate(uses) if use.is_live]
    return [name for found in (decisions, numbers) for name in (*found, *["None"] * (most - len(found)))]
