"""A function that takes as inputs what it asks of numbers: outcomes of comparisons, and numbers that it computes.

``step % 100 == 0`` is computed before the call, and is part of its key; ``math.sqrt(k)`` is computed before the call,
and read as a number that the caller passes. So the trace is good for all numbers of which the outcomes are the same.
"""

# Functions here are of any type, and so is what they are called with.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from pygraph.calls import limits
from pygraph.calls.function import CONDITION
from pygraph.tracing.function_kinds import Renaming
from pygraph.tracing.live_numbers import Live
from pygraph.tracing.number_conditions import NAMES, NO_OUTCOME
from pygraph.tracing.number_uses import NAME, NumberUse, NumberUses

_NO_NUMBER = "no outcome"
"""The outcome of a comparison that cannot be made, and of one where neither it nor its opposite holds, as of NaN.

Where a comparison cannot be made, the function raises the error, if it comes to it.
"""


class NumberFunction(Renaming):
    """A function of what it asks of numbers, and of its arguments.

    Args:
        fn: The function.
        name: What reports call it.
        paths: The paths of the leaves of its arguments.
    """

    def __init__(self, fn: Callable[..., Any], name: str, paths: Sequence[str]) -> None:
        self.uses: tuple[NumberUse, ...] = ()
        self._paths = paths
        self.__name__ = name
        self.__wrapped__ = fn  # where the walk over what a function reaches finds it

    def __call__(self, found: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the function."""
        leaves = pytree.tree_leaves((args, kwargs))
        numbers = [leaf for leaf in (*leaves, *found) if isinstance(leaf, Live)]
        if not numbers:  # none is live, or this is no trace
            return self.__wrapped__(*args, **kwargs)
        uses = numbers[0].uses
        before = uses.known, uses.wanted
        uses.known, uses.wanted = self._known(found), self.wanted
        try:
            for index, leaf in enumerate(leaves):
                _name(leaf, f"n{index}", uses)
            return self.__wrapped__(*args, **kwargs)
        finally:
            # Later on, only texts are compared; the numbers must not outlive the trace.
            uses.known, uses.wanted = dict.fromkeys(uses.known), self.wanted
            if before[1] is not None:
                uses.known, uses.wanted = before

    def _known(self, found: Sequence[Any]) -> dict[str, Any]:
        """Outcomes and numbers that the function is given, by text."""
        known: dict[str, Any] = {}
        for use, value in zip(self.uses, _by_use(self.uses, found), strict=True):
            if value is not None:
                known[use.text] = value
                if isinstance(value, Live):
                    _name(value, use.text, value.uses)
        return known

    def wanted(self, missing: Collection[NumberUse]) -> list[NumberUse]:
        """The part of what a trace has asked for that the function can still be given."""
        new = [use for use in missing if use not in self.uses]
        most, held = limits.LIMITS.conditions, [use.is_live for use in self.uses]
        decisions = [use for use in new if not use.is_live][: most - held.count(False)]
        numbers = [use for use in new if use.is_live][: most - held.count(True)]
        return [use for use in new if use in decisions or use in numbers]

    def path(self, path: str) -> str:
        """The name that reports give to an argument or a result of this function; none for what is not used."""
        if not path.startswith("args[") or path == "args[0]":
            return path
        kind, rest = int(path[5:].partition("]")[0]), path.partition("]")[2]
        if kind > 0:
            return ("args", "kwargs")[kind - 1] + rest
        slot, most = int(rest[1:].partition("]")[0]), limits.LIMITS.conditions
        used = [use for use in self.uses if use.is_live == (slot >= most)]
        if slot % most >= len(used):
            return ""
        return CONDITION if slot < most else NAME.sub(lambda name: self._paths[int(name[1])], used[slot % most].text)


def decision_slots() -> range:
    """The positions of decisions in the list that a `NumberFunction` is passed; behind them are computed numbers."""
    return range(limits.LIMITS.conditions)


def _by_use(uses: Sequence[NumberUse], found: Sequence[Any]) -> list[Any]:
    """The items of that list in the order of what the function asks for."""
    half = limits.LIMITS.conditions
    decisions, numbers = iter(found[:half]), iter(found[half:])
    return [next(numbers if use.is_live else decisions) for use in uses]


def _name(leaf: Any, text: str, uses: NumberUses) -> None:
    """Give a live number that the traced function is passed the text by which calls compute with it."""
    if isinstance(leaf, Live) and leaf.source is not None:
        node: Any = leaf.node  # pyright: ignore[reportAttributeAccessIssue]
        leaf.source = dataclasses.replace(leaf.source, text=text)
        uses.names[node.expr] = text


Computer = Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]
"""Computes, of the arguments of a call, the list that a `NumberFunction` is passed."""


def computer_of(uses: Sequence[NumberUse], paths: Sequence[str]) -> Computer:
    """A function that computes the list that a `NumberFunction` is passed.

    Args:
        uses: What the function asks for.
        paths: The path of each leaf of the arguments.
    """
    names: dict[str, Any] = {**NAMES, "errors": NO_OUTCOME, "no_number": _NO_NUMBER}
    leaves = sorted(frozenset[int]().union(*(use.leaves() for use in uses)))
    lines = ["def compute(args, kwargs):", *(f"    n{leaf} = {paths[leaf]}" for leaf in leaves)]
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
    most = limits.LIMITS.conditions
    decisions = [f"u{index}" for index, use in enumerate(uses) if not use.is_live]
    numbers = [f"u{index}" for index, use in enumerate(uses) if use.is_live]
    return [name for found in (decisions, numbers) for name in (*found, *["None"] * (most - len(found)))]
