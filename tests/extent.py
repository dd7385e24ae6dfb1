"""How much a run of the tests does: the short run, which is the default, or everything, with ``--long``.

`tests/conftest.py` sets it before it collects, so that modules may ask while they are imported.
"""

from __future__ import annotations

_long = False


def choose(long: bool) -> None:
    """Set whether this run does everything."""
    global _long
    _long = long


def is_long() -> bool:
    """Whether this run does everything."""
    return _long


def examples(short: int, long: int) -> int:
    """Number of hypothesis's examples in this run."""
    return long if _long else short
