"""Kernel times of one kind of call, by the user's source lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pygraph.ir.source_lines import text_of

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


@dataclasses.dataclass(frozen=True)
class OperationTime:
    """The kernels of one operation of a Program, as they were measured.

    Attributes:
        source: The user's line, as ``train.py:41``; None if it is not known.
        scopes: The user's scopes, from the outermost to the innermost.
        operation: The operation's name.
        kernels: The microseconds of each kernel that it has launched.
        is_backward: Whether it is of the backward of that line.
        node: The name of its node in the graph of the Program.
    """

    source: str | None
    scopes: tuple[str, ...]
    operation: str
    kernels: tuple[float, ...]
    is_backward: bool = False
    node: str = ""


@dataclasses.dataclass(frozen=True)
class ProfileRow:
    """The kernels of one source line, in the same scopes.

    Attributes:
        source: The line, as ``train.py:41``; None for what comes from no line of the user's.
        text: The code on it; empty if it is not known.
        operations: The operations that launch kernels, each once.
        kernels: The number of kernels.
        us: Their microseconds.
        share: The share of the microseconds of all kernels, between 0 and 1.
        scopes: The user's scopes, from the outermost to the innermost.
        is_backward: Whether they are those of the line's backward.
    """

    source: str | None
    text: str
    operations: tuple[str, ...]
    kernels: int
    us: float
    share: float
    scopes: tuple[str, ...]
    is_backward: bool = False


@dataclasses.dataclass(frozen=True)
class Profile:
    """Kernel times of one kind of call.

    Attributes:
        rows: The lines, those with most time first.
        us: The microseconds of all kernels.
        how: How they were measured.
        nodes: The microseconds of each node's kernels, by the node's name in the graph of the Program.
    """

    rows: tuple[ProfileRow, ...]
    us: float
    how: str
    nodes: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float], repr=False)

    @classmethod
    def of(cls, times: Iterable[OperationTime], how: str) -> Profile:
        """Add operations up by source line and scopes.

        Example:
            >>> sin = OperationTime("train.py:3", (), "aten.sin", (2.0,))
            >>> add = OperationTime("train.py:4", ("loss",), "aten.add", (1.0, 5.0))
            >>> for row in Profile.of([sin, add], "by the clock").rows:
            ...     print(row.source, row.operations, row.kernels, row.us, row.share)
            train.py:4 ('aten.add',) 2 6.0 0.75
            train.py:3 ('aten.sin',) 1 2.0 0.25
        """
        found: dict[tuple[Any, ...], list[OperationTime]] = {}
        for one in times:
            if one.kernels:
                found.setdefault((one.source, one.is_backward, one.scopes), []).append(one)
        total = sum(sum(one.kernels) for operations in found.values() for one in operations)
        rows = [_row(operations, total) for operations in found.values()]
        nodes = {one.node: sum(one.kernels) for operations in found.values() for one in operations if one.node}
        return cls(tuple(sorted(rows, key=lambda row: -row.us)), round(total, 3), how, nodes)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {"rows": [dataclasses.asdict(row) for row in self.rows], "us": self.us, "how": self.how}


def _row(operations: Sequence[OperationTime], total: float) -> ProfileRow:
    times, first = [microseconds for one in operations for microseconds in one.kernels], operations[0]
    return ProfileRow(
        first.source, text_of(first.source), tuple(dict.fromkeys(one.operation for one in operations)), len(times),
        round(sum(times), 3), sum(times) / total if total else 0.0, first.scopes, first.is_backward,
    )  # fmt: skip


def profile_of(title: str, profile: Profile | str | None) -> Iterator[Table | Text]:
    """The part of a report about a profile: a table, or why there is none; nothing if nobody has asked for it."""
    from rich.text import Text

    if isinstance(profile, str):
        yield Text(f"profile of {title}: {profile}")
    elif profile is not None:
        yield _table(profile, title)


def _table(profile: Profile, title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    heading = f"profile of {title}: {profile.us:,.1f} µs in kernels ({profile.how})"
    table = Table(title=Text(heading), title_justify="left")
    for column in ("line", "code", "operations", "kernels", "µs", "share", "scopes"):
        table.add_column(column, overflow="fold", justify="right" if column in _NUMBERS else "left")
    for row in profile.rows:
        line = f"{row.source or '(none)'}{' (backward)' if row.is_backward else ''}"
        table.add_row(
            Text(line), Text(row.text), Text(", ".join(row.operations)), str(row.kernels),
            f"{row.us:,.1f}", f"{row.share:.0%}", Text(" / ".join(row.scopes)),
        )  # fmt: skip
    return table


_NUMBERS = ("kernels", "µs", "share")
