"""The rows of the table: all, those that are named, or one share of them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from benchmarks.table.workload import Workload
from pygraph.errors import PygraphError

MODULE = "benchmarks.table.workloads"
"""The module whose ``WORKLOADS`` are the table."""


class BenchError(PygraphError):
    """The benchmark cannot run: its options name what is not there, or its workloads cannot be loaded.

    Example: ``--only xlnet`` where the rows are called ``xlnet-i`` and ``xlnet-t``. Remedy: the names that ``--list``
    prints.
    """


def load(module: str = MODULE) -> dict[str, Workload]:
    """All rows by name, in the order of the table.

    Raises:
        BenchError: There is no such module.
    """
    try:
        return dict(importlib.import_module(module).WORKLOADS)
    except ModuleNotFoundError as error:
        if not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise BenchError(f"bench: there is no module {module} with the workloads. Use a whole checkout.") from None


def chosen(rows: dict[str, Workload], only: Sequence[str] | None, shard: tuple[int, int] | None) -> list[Workload]:
    """The rows that are named, in the order of the table, and of these one share.

    Args:
        rows: All rows.
        only: Names; None for all.
        shard: (K, N) for the K-th of N shares, from 1; every N-th row, so that rows alike are spread.

    Raises:
        BenchError: A name is of no row.
    """
    unknown = [name for name in only or () if name not in rows]
    if unknown:
        raise BenchError(f"bench --only {' '.join(unknown)}: no such row. Rows: {', '.join(rows)}.")
    found = [row for name, row in rows.items() if only is None or name in only]
    if shard is None:
        return found
    number, count = shard
    return found[number - 1 :: count]


def check_ways(ways: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The ways in the order in which they are known, with eager, which all is compared with.

    Raises:
        BenchError: There is no such way.
    """
    unknown = [way for way in ways if way not in known]
    if unknown:
        raise BenchError(
            f"bench --ways {' '.join(map(repr, unknown))}: no such way. Ways: {', '.join(map(repr, known))}."
        )
    return tuple(way for way in known if way in ways or way == "eager")
