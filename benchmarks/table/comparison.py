"""Ratios of times, their geometric means, and which rows are won and lost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from benchmarks.table.results import Row

MARGIN = 0.02
"""Rows that differ by less are neither won nor lost."""

Quartiles = Sequence[float]
"""The quartiles of an iteration's microseconds."""

BASELINES = {
    "default": ("compile",),
    "reduce-overhead": ("reduce-overhead",),
    "best mode": ("compile", "reduce-overhead", "max-autotune"),
}
"""With which ways another one is compared: the fastest of those that have run."""


def quartiles(row: Row, way: str) -> Quartiles | None:
    """The quartiles of an iteration; None if the way has not run, or its results are wrong."""
    found = row["ways"].get(way, {})
    times = found.get("wall_us")
    return times if times and found.get("right") is not False else None


def fastest(row: Row, ways: Iterable[str]) -> Quartiles | None:
    """The quartiles of that of some ways whose median is least; None if none has run."""
    return min((one for way in ways if (one := quartiles(row, way))), key=lambda one: one[1], default=None)


def speed_up(row: Row, own: Sequence[str], over: Sequence[str]) -> float | None:
    """How many times faster the fastest of some ways is than that of others; None if none of one side has run."""
    mine, other = fastest(row, own), fastest(row, over)
    return other[1] / mine[1] if mine and other else None


def is_faster(own: Quartiles, other: Quartiles) -> bool:
    """Whether a way is faster by more than the margin, and by more than rounds of one way differ.

    A GPU whose clocks fall for a while, as it draws all the power that it may, slows some rounds by a tenth.

    >>> is_faster([9, 10, 11], [11.5, 12, 14]), is_faster([9, 10, 12], [11.5, 12, 14]), is_faster([9, 9, 9], [9.1] * 3)
    (True, False, False)
    """
    return other[1] / own[1] > 1 + MARGIN and other[0] > own[2]


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
        won: The number of rows on which it is faster, by `is_faster`.
        lost: Rows on which it is slower.
        rows: On how many rows both have run.
    """

    mean: float | None
    won: int
    lost: tuple[str, ...]
    rows: int


def compare(rows: Iterable[Row], own: Sequence[str], over: Sequence[str]) -> Comparison:
    """Compare the fastest of some ways with the fastest of others."""
    found = {row["row"]: (mine, other) for row in rows if (mine := fastest(row, own)) and (other := fastest(row, over))}
    return Comparison(
        geometric_mean(other[1] / mine[1] for mine, other in found.values()),
        sum(is_faster(mine, other) for mine, other in found.values()),
        tuple(name for name, (mine, other) in found.items() if is_faster(other, mine)),
        len(found),
    )
