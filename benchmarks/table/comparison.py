"""Ratios of times, their geometric means, and which rows are won and lost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from benchmarks.table.results import Row

MARGIN = 0.02
"""Rows that differ by less are neither won nor lost."""

BASELINES = {
    "default": ("compile",),
    "reduce-overhead": ("reduce-overhead",),
    "best mode": ("compile", "reduce-overhead", "max-autotune"),
}
"""With which ways another one is compared: the fastest of those that have run."""


def wall(row: Row, way: str) -> float | None:
    """Median microseconds of an iteration; None if the way has not run, or its results are wrong."""
    found = row["ways"].get(way, {})
    times = found.get("wall_us")
    return times[1] if times and found.get("right") is not False else None


def fastest(row: Row, ways: Iterable[str]) -> float | None:
    """The median microseconds of the fastest of some ways; None if none has run."""
    return min((time for way in ways if (time := wall(row, way)) is not None), default=None)


def speed_up(row: Row, own: Sequence[str], over: Sequence[str]) -> float | None:
    """How many times faster the fastest of some ways is than that of others; None if none of one side has run."""
    mine, other = fastest(row, own), fastest(row, over)
    return other / mine if mine and other else None


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of no values.

    >>> geometric_mean([1.0, 4.0]), geometric_mean([])
    (2.0, None)
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A way compared with others on several rows.

    Attributes:
        mean: The geometric mean of its speed-ups; None if there are none.
        won: The number of rows on which it is faster by more than the margin.
        lost: Rows on which it is slower by more than that.
        rows: On how many rows both have run.
    """

    mean: float | None
    won: int
    lost: tuple[str, ...]
    rows: int


def compare(rows: Iterable[Row], own: Sequence[str], over: Sequence[str]) -> Comparison:
    """Compare the fastest of some ways with the fastest of others."""
    found = {row["row"]: ratio for row in rows if (ratio := speed_up(row, own, over)) is not None}
    return Comparison(
        geometric_mean(found.values()),
        sum(ratio > 1 + MARGIN for ratio in found.values()),
        tuple(name for name, ratio in found.items() if ratio < 1 / (1 + MARGIN)),
        len(found),
    )
