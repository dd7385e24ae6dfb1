"""The report of a transformed function: which regions of its calls run as graphs, which do not, and why."""

from __future__ import annotations

import collections
import dataclasses
import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pygraph.ir.descriptors import Fallback
from pygraph.report.call_report import NO_COUNTS, NO_MECHANISMS, NO_MEMORY, CallReport
from pygraph.report.profile import profile_of
from pygraph.report.verdict import Totals, differences, groups, title_of

if TYPE_CHECKING:
    from rich.table import Table


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
    """The report of a transformed function; ``str()`` is a table, ``to_dict()`` plain data.

    Attributes:
        name: The function.
        calls: One report per kind of call, least recently used first.
        inlined: Numbers of calls that were traced into another function or ran eagerly without a cache entry, by
            reason.
        donated: One report per donated argument and reason.
        in_python: Lines of the function that run as Python before, between or after its graphs, and why.
        slow_calls: Why calls are not served by the C++ extension, so that each costs time in Python; None if they are.
        totals: Counts of calls and compilations; None where they are not counted.
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
        """Add the reports of functions that ``vmap``, ``grad`` or ``jvp`` derived from the reported one."""
        reports = [self, *others]
        named = (dataclasses.replace(c, function=r.name) for r in reports[1:] for c in r.calls)
        inlined: collections.Counter[Fallback] = collections.Counter()
        for report in reports:
            inlined.update(report.inlined)
        return dataclasses.replace(
            self,
            calls=(*self.calls, *named),
            inlined=dict(inlined),
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data: the latest kind of call at the top, all kinds in ``entries``, counted fallbacks."""
        counted: collections.Counter[Fallback] = collections.Counter(self.inlined)
        for call in self.calls:
            for fallback in call.fallbacks:
                counted[fallback] += call.calls
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

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        text = io.StringIO()
        console = Console(file=text, width=120, color_system=None, legacy_windows=False)
        for line in [*([str(self.totals)] if self.totals is not None else []), *differences(self.calls)]:
            console.print(Text(f"{self.name}: {line}"))
        table = Table(title=f"pygraph: {self.name}", title_justify="left")
        for column in ("call", "calls", "kernels", "in graphs", "nodes", "patched", "bytes copied", "regions"):
            table.add_column(column, overflow="fold")
        for group in groups(self.calls):
            call, counts = group[0], group[0].counts
            table.add_row(
                Text(title_of(group)), str(sum(one.calls for one in group)), str(counts["kernels"]),
                str(counts["kernels_in_graphs"]), str(counts["nodes"]), _patched(counts, call.mechanisms),
                str(counts["bytes_copied_per_replay"]), call.ways,
            )  # fmt: skip
        console.print(table)
        if any(any(call.memory.values()) for call in self.calls):
            console.print(self._memory_table())
        for call in self.calls:
            for part in profile_of(call.title, call.profile):
                console.print(part)
        chosen = collections.Counter(
            f"region {region.index} {region.selection}"
            for call in self.calls
            for region in call.regions
            if region.selection is not None
        )
        for line, count in chosen.items():
            console.print(Text(line if count == 1 else f"{line} (in {count} kinds of calls)"))
        for report in self.donated:
            what = "became a result's" if report.reason is None else f"was not used: {report.reason}"
            console.print(Text(f"donated ×{report.count}: {report.argument}: its memory {what}"))
        for lines in self.in_python:
            console.print(Text(f"in Python: {lines}"))
        for fallback in self.to_dict()["fallbacks"]:
            where = f" ({fallback['source']})" if fallback["source"] else ""
            console.print(Text(f"fallback ×{fallback['count']}: {fallback['what']}: {fallback['reason']}{where}"))
        if not self.to_dict()["fallbacks"]:
            console.print("no fallbacks")
        if self.slow_calls is not None:
            console.print(Text(f"calls are recognised in Python: {self.slow_calls}"))
        return text.getvalue()

    def _memory_table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="memory in bytes", title_justify="left")
        headings = (
            "call",
            "pool (all graphs share it)",
            "captured, in place",
            "staging buffers",
            "results per call",
        )
        for column in headings:
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
