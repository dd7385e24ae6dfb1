"""Parts of the results that all benchmarks write: command line and quartiles."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path


def command_line() -> str:
    """The command that was run, without this machine's folders."""
    arguments = [Path(argument).name if argument.startswith("/") else argument for argument in sys.argv[1:]]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def quartiles(values: Iterable[float], digits: int) -> list[float]:
    """Lower quartile, median, upper quartile.

    >>> quartiles([4.0, 1.0, 2.0, 3.0, 5.0], 2)
    [2.0, 3.0, 4.0]
    >>> quartiles([4.0], 2)  # of one value
    [4.0, 4.0, 4.0]
    """
    values = list(values)
    found = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(value, digits) for value in found]
