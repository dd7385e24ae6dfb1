"""The verdict of a report: how often a function was called and compiled, and what its kinds of calls differ in."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence

from pygraph.report.call_report import CallReport
from pygraph.report.remedies import remedy_of_values

_MOST_VALUES = 8
"""Values of one argument that a line shows."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """Counts of a function, with all that is derived from it.

    Attributes:
        hits: Calls that found what they run.
        misses: Calls that did not.
        captures: Graphs that were recorded.
        evictions: Kinds of calls that made room for others.
        seconds: The time that traces and recordings have taken.
        skipped: Calls that ran as they are, without a look, as calls like them had just done.
    """

    hits: int
    misses: int
    captures: int
    evictions: int
    seconds: float
    skipped: int = 0

    def __str__(self) -> str:
        evicted = f", {self.evictions} kinds of calls dropped for others" if self.evictions else ""
        count = self.hits + self.misses + self.skipped
        calls = f"{_many(count, 'call')}: {_many(self.hits, 'hit')}, {self.misses} compiled or looked at"
        if self.skipped:
            calls += f", {self.skipped} run as they are"
        return f"{calls}; {_many(self.captures, 'graph')} recorded, {self.seconds:.2f} s of compiling{evicted}"


def groups(calls: Sequence[CallReport]) -> list[list[CallReport]]:
    """Kinds of calls that differ in values of arguments only, and run in the same way, in their order."""
    found: dict[Hashable, list[CallReport]] = {}
    for call in calls:
        numbers = (*call.counts.items(), *call.mechanisms.items())
        key = (
            call.function,
            call.arguments,
            tuple(call.baked),
            numbers,
            call.ways,
            call.fallbacks,
            call.differentiated,
        )
        found.setdefault(key if call.baked else id(call), []).append(call)
    return list(found.values())


def title_of(group: Sequence[CallReport]) -> str:
    """The arguments of some kinds of calls, with the values that are part of their traces.

    Args:
        group: Kinds of calls that differ in these values only.
    """
    title = group[0].title
    values = [f"{path} = {_listed([call.baked[path] for call in group])}" for path in group[0].baked]
    return ", ".join(filter(None, [title, *values]))


def differences(calls: Sequence[CallReport]) -> list[str]:
    """Lines about arguments whose values alone have made other kinds of calls."""
    lines: list[str] = []
    for group in groups(calls):
        different = varying([call.baked for call in group])
        shown = [f"{path} was {_listed(values)}" for path, values in different.items()]
        if shown:
            remedy = remedy_of_values(are_numbers=all(map(_is_number, itertools.chain(*different.values()))))
            lines.append(f"{len(group)} kinds of calls differ in nothing but values: {'; '.join(shown)}. {remedy}")
    return lines


def varying(kinds: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """The texts of arguments that are not the same in all kinds of calls, by path.

    >>> varying([{"n": "1", "name": "'a'"}, {"n": "2", "name": "'a'"}])
    {'n': ['1', '2']}
    """
    texts = {path: [kind[path] for kind in kinds] for path in kinds[0]}
    return {path: found for path, found in texts.items() if len(set(found)) > 1}


def _is_number(text: str) -> bool:
    """Whether the text of a value is that of a number.

    >>> _is_number("2"), _is_number("np.float64(0.5)"), _is_number("True"), _is_number("'2'")
    (True, True, True, False)
    """
    text = text.partition("(")[2].removesuffix(")") if text.startswith("np.") else text
    try:
        complex(text)
    except ValueError:
        return text in ("True", "False")
    return True


def _listed(values: Sequence[str]) -> str:
    different = list(dict.fromkeys(values))
    more = len(different) - _MOST_VALUES
    return ", ".join([*different[:_MOST_VALUES], *([f"{more} more"] if more > 0 else [])])


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
