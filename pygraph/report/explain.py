"""The report of a transformed function: which regions of its calls run as graphs, which do not, and why."""

from __future__ import annotations

import collections
import dataclasses
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraph.errors import ArgumentError, describe
from pygraph.ir.descriptors import Fallback
from pygraph.report.call_report import MEMORY_TITLES, NO_COUNTS, NO_MECHANISMS, NO_MEMORY, CallReport
from pygraph.report.profile import profile_of
from pygraph.report.remedies import remedy_of
from pygraph.report.verdict import Totals, differences, groups, title_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


_SUFFIXES = (".html", ".htm")


@dataclasses.dataclass(frozen=True)
class DonatedReport:
    """The number of calls in which a donated argument's memory became a result's, or did not for a reason.

    Attributes:
        argument: The argument's path.
        reason: Why its memory was not used; None if it was.
        count: The number of calls.
    """

    argument: str
    reason: str | None
    count: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The report of a transformed function.

    ``str()`` is text of 120 columns. `rich` prints it in colour, as wide as the terminal; notebooks show a page, which
    ``save("report.html")`` writes; ``to_dict()`` is plain data.

    Attributes:
        name: The function.
        calls: One report per kind of call, least recently used first.
        inlined: Numbers of calls that were traced into another function or ran eagerly without a cache entry, by
            reason.
        donated: One report per donated argument and reason.
        in_python: Lines of the function that run as Python before, between or after its graphs, and why.
        slow_calls: Why calls are not served by the C++ extension, so that each costs time in Python; None if they are.
        totals: Counts of calls and compilations; None where they are not counted.

    Example:
        >>> import torch, pygraph
        >>> fast = pygraph.jit(lambda x: torch.sin(x) + 1)
        >>> _ = fast(torch.ones(4, device=pygraph.default_device()))
        >>> print(fast.explain())  # doctest: +ELLIPSIS
        <lambda>: 1 call: 0 hits, 1 compiled or looked at; 1 graph recorded, ...
    """

    name: str
    calls: tuple[CallReport, ...]
    inlined: dict[Fallback, int]
    donated: tuple[DonatedReport, ...] = ()
    in_python: tuple[str, ...] = ()
    slow_calls: str | None = None
    totals: Totals | None = None

    def with_donated(self, notes: Mapping[tuple[str, str | None], int]) -> Explanation:
        """Add the outcomes of donations, counted by path and reason."""
        donated = tuple(DonatedReport(path, reason, count) for (path, reason), count in notes.items())
        return dataclasses.replace(self, donated=donated)

    def with_derived(self, others: Iterable[Explanation]) -> Explanation:
        """Add the reports of functions that run for the reported one: its gradient, its parts, modules inside of it."""
        reports = [self, *others]
        named = (dataclasses.replace(c, function=r.name) for r in reports[1:] for c in r.calls)
        inlined: collections.Counter[Fallback] = collections.Counter()
        for report in reports:
            inlined.update(report.inlined)
        return dataclasses.replace(
            self,
            calls=(*self.calls, *named),
            inlined=dict(inlined),
            in_python=tuple(dict.fromkeys(lines for report in reports for lines in report.in_python)),
        )

    def counted_fallbacks(self) -> dict[Fallback, int]:
        """Everything that does not run in the best way, with the number of calls."""
        counted: collections.Counter[Fallback] = collections.Counter(self.inlined)
        for call in self.calls:
            for fallback in call.fallbacks:
                counted[fallback] += call.calls
        return dict(counted)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data: the latest kind of call at the top, all kinds in ``entries``, counted fallbacks."""
        counted = self.counted_fallbacks()
        latest = CallReport((), NO_COUNTS, (), (), 0, NO_MEMORY, NO_MECHANISMS).to_dict()
        if self.calls:
            latest = self.calls[-1].to_dict()
        return {
            "name": self.name,
            **latest,
            "fallbacks": [{**dataclasses.asdict(fallback), "count": count} for fallback, count in counted.items()],
            "donated": [dataclasses.asdict(report) for report in self.donated],
            "entries": [call.to_dict() for call in self.calls],
            "in_python": list(self.in_python),
            "slow_calls": self.slow_calls,
            "totals": None if self.totals is None else dataclasses.asdict(self.totals),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file, which needs no other one and no network.

        It has what ``str()`` has, and the Program of each kind of call: drawn, and line by line of the user's.

        Args:
            path: The file, as ``report.html``.

        Raises:
            ArgumentError: It ends otherwise than in ``.html`` or ``.htm``.
        """
        from pygraph.report.page import page

        if Path(path).suffix.lower() not in _SUFFIXES:
            expected = "a name that ends in " + ", ".join(_SUFFIXES)
            call = f"explain().save({os.fspath(path)!r})"
            raise ArgumentError(describe(call, "unknown kind of file", expected=expected))
        Path(path).write_text(page(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        from pygraph.report.page import fragment

        return fragment(self)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None, legacy_windows=False).print(self)
        return text.getvalue()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for line in [*([str(self.totals)] if self.totals is not None else []), *differences(self.calls)]:
            yield Text(f"{self.name}: {line}", style="bold")
        yield self._table()
        if any(any(call.memory.values()) for call in self.calls):
            yield self._memory_table()
        for call in self.calls:
            yield from profile_of(call.title, call.profile)
        chosen = collections.Counter(
            f"region {region.index} {region.selection}"
            for call in self.calls
            for region in call.regions
            if region.selection is not None
        )
        for line, count in chosen.items():
            yield Text(line if count == 1 else f"{line} (in {count} kinds of calls)")
        for call in self.calls:
            yield from map(Text, call.between_graphs)
        for report in self.donated:
            what = "became a result's" if report.reason is None else f"was not used: {report.reason}"
            yield Text(f"donated ×{report.count}: {report.argument}: its memory {what}")
        for lines in self.in_python:
            yield Text(f"in Python: {lines}", style="yellow")
        fallbacks = self.counted_fallbacks()
        for fallback, count in fallbacks.items():
            remedy = remedy_of(fallback)
            yield Text(f"fallback ×{count}: {fallback}{f'. {remedy}' if remedy else ''}", style="yellow")
        if not fallbacks:
            if self.in_python:
                yield Text("no fallbacks in the graphs; kernels of the lines in Python are not counted above")
            else:
                yield Text("no fallbacks", style="green")
        if self.slow_calls is not None:
            yield Text(f"calls are recognised in Python: {self.slow_calls}", style="yellow")

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        title = Text(f"pygraph: {self.name}", style="italic")
        table = Table(title=title, title_justify="left")
        for column in ("call", "calls", "kernels", "in graphs", "nodes", "patched", "bytes copied", "regions"):
            table.add_column(column, overflow="fold", min_width=24 if column == "call" else None)
        for group in groups(self.calls):
            call, counts = group[0], group[0].counts
            is_graph = counts["kernels"] == counts["kernels_in_graphs"] > 0
            table.add_row(
                Text(title_of(group)), str(sum(one.calls for one in group)), str(counts["kernels"]),
                str(counts["kernels_in_graphs"]), str(counts["nodes"]), _patched(counts, call.mechanisms),
                str(counts["bytes_copied_per_replay"]), Text(call.ways, style="green" if is_graph else "yellow"),
            )  # fmt: skip
        return table

    def _memory_table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="memory in bytes", title_justify="left")
        for column in ("call", *MEMORY_TITLES.values()):
            table.add_column(column, overflow="fold")
        for group in groups(self.calls):
            if group[0].differentiated:
                continue
            most = (max(call.memory[name] for call in group) for name in NO_MEMORY)
            table.add_row(Text(title_of(group)), *(f"{size:,}" for size in most))
        return table

    __repr__ = __str__


def _patched(counts: dict[str, int], mechanisms: dict[str, int]) -> str:
    """The number of patched nodes, by mechanism unless the host patches all."""
    used = [f"{count} by {name}" for name, count in mechanisms.items() if count and name != "copy"]
    alone = len(used) < 2 and not mechanisms["device"] and not mechanisms["table"]
    return str(counts["patched_nodes"]) if alone else f"{counts['patched_nodes']} ({', '.join(used)})"
