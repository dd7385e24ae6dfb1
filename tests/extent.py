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
        third: Which third of what rotates a short run takes.
    """

    is_long: bool = False
    third: int = 0


CHOSEN = Extent()


def examples(short: int, long: int) -> int:
    """Number of hypothesis's examples in this run."""
    return long if CHOSEN.is_long else short


def third(items: Sequence[T]) -> Sequence[T]:
    """The items that this run takes: in a short one every third, from another one on every day."""
    return items if CHOSEN.is_long else items[CHOSEN.third :: 3]
