"""How much a run of the tests does: the short run, which is the default, or everything, with ``--long``.

`tests/conftest.py` sets it before it collects, so that modules may ask while they are imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass
class Extent:
    """Of this run.

    Attributes:
        is_long: Whether it does everything.
        day: The number of the day, on which it depends what a short run takes of what rotates.
    """

    is_long: bool = False
    day: int = 0


CHOSEN = Extent()


def examples(short: int, long: int) -> int:
    """Number of hypothesis's examples in this run, or of anything else that is done again and again."""
    return long if CHOSEN.is_long else short


def third(items: Sequence[T]) -> Sequence[T]:
    """The items that this run takes: in a short one every third, from another one on every day."""
    return items if CHOSEN.is_long else items[CHOSEN.day % 3 :: 3]


def one_of(items: Sequence[T], position: int) -> Sequence[T]:
    """The items that this run takes: in a short one a single one, another one at each position and after three days."""
    if CHOSEN.is_long or not items:
        return items
    chosen = (position + CHOSEN.day // 3) % len(items)
    return items[chosen : chosen + 1]
