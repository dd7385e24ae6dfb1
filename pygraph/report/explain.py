"""The report of a transformed function: which regions of its calls run as graphs, which do not, and why."""

from __future__ import annotations

import collections
import dataclasses
import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pygraph.ir.descriptors import Fallback, Region

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class CallReport:
    """How one kind of call runs: the calls that one cache entry serves.

    Attributes:
        arguments: Path and kind of each argument.
        counts: Numbers of kernels, of kernels in graphs, of nodes, of nodes whose parameters change, and of bytes that
            a replay copies.
        regions: The parts of the Program, and how each runs.
        fallbacks: What does not run in the best way, and why.
        calls: The number of such calls.
        memory: Bytes: ``pool``, private memory that all graphs of the function share; ``static``, captured tensors that
            are read in place; ``copied``, staging buffers of inputs that are copied; ``outputs``, allocated per call.
        mechanisms: Numbers of nodes that get their pointers from the ``host``, from the ``device`` and from a
            ``table``, and of inputs and results that are copied (``copy``).
        function: The function if it was derived from the reported one, as the ``backward(…)`` of its gradient.
        differentiated: Whether the calls are differentiated from outside, and therefore run as derived functions.
    """

    arguments: tuple[str, ...]
    counts: dict[str, int]
    regions: tuple[Region, ...]
    fallbacks: tuple[Fallback, ...]
    calls: int
    memory: dict[str, int]
    mechanisms: dict[str, int]
    function: str | None = None
    differentiated: bool = False

    @property
    def title(self) -> str:
        """The first arguments, after the name of a derived function."""
        shown = list(self.arguments[:_MOST_ARGUMENTS])
        if len(self.arguments) > len(shown):
            shown.append(f"{len(self.arguments) - len(shown)} more")
        if self.differentiated:
            return "differentiated from outside"
        return ", ".join(shown) if self.function is None else f"{self.function}: {', '.join(shown)}"

    @property
    def ways(self) -> str:
        """Kind and way of each region."""
        if self.differentiated:
            return "as derived functions"
        return ", ".join(f"{region.kind}:{region.way}" for region in self.regions) or "as it is"

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to plain data."""
        return {
            "function": self.function,
            "arguments": list(self.arguments),
            **self.counts,
            "memory": dict(self.memory),
            "mechanisms": dict(self.mechanisms),
            "regions": [
                {
                    "kind": region.kind, "way": region.way, "reason": region.reason, "source": region.source,
                    "times_us": dict(region.times),
                    "selection": None if region.selection is None else region.selection.to_dict(),
                }
                for region in self.regions
            ],
            "fallbacks": [{**dataclasses.asdict(fallback), "count": self.calls} for fallback in self.fallbacks],
            "calls": self.calls,
            "differentiated": self.differentiated,
        }  # fmt: skip


# Arguments that a table shows; a backward may take hundreds. The plain data has all.
_MOST_ARGUMENTS = 4

NO_COUNTS = {"kernels": 0, "kernels_in_graphs": 0, "nodes": 0, "patched_nodes": 0, "bytes_copied_per_replay": 0}

NO_MECHANISMS = {"host": 0, "device": 0, "table": 0, "copy": 0}

NO_MEMORY = {"pool": 0, "static": 0, "copied": 0, "outputs": 0}


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
    """

    name: str
    calls: tuple[CallReport, ...]
    inlined: dict[Fallback, int]
    donated: tuple[DonatedReport, ...] = ()
    in_python: tuple[str, ...] = ()
    slow_calls: str | None = None

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
        }

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        text = io.StringIO()
        console = Console(file=text, width=120, color_system=None, legacy_windows=False)
        table = Table(title=f"pygraph: {self.name}", title_justify="left")
        for column in ("call", "calls", "kernels", "in graphs", "nodes", "patched", "bytes copied", "regions"):
            table.add_column(column, overflow="fold")
        for call in self.calls:
            counts = call.counts
            table.add_row(
                Text(call.title), str(call.calls), str(counts["kernels"]),
                str(counts["kernels_in_graphs"]), str(counts["nodes"]), _patched(counts, call.mechanisms),
                str(counts["bytes_copied_per_replay"]), call.ways,
            )  # fmt: skip
        console.print(table)
        if any(any(call.memory.values()) for call in self.calls):
            console.print(self._memory_table())
        for region_call in self.calls:
            for region in region_call.regions:
                if region.selection is not None:
                    console.print(Text(f"region {region.index} {region.selection}"))
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
        for call in self.calls:
            if call.differentiated:
                continue
            table.add_row(Text(call.title), *(f"{call.memory[name]:,}" for name in NO_MEMORY))
        return table

    __repr__ = __str__


def _patched(counts: dict[str, int], mechanisms: dict[str, int]) -> str:
    """The number of patched nodes, by mechanism unless the host patches all."""
    used = [f"{count} by {name}" for name, count in mechanisms.items() if count and name != "copy"]
    alone = len(used) < 2 and not mechanisms["device"] and not mechanisms["table"]
    return str(counts["patched_nodes"]) if alone else f"{counts['patched_nodes']} ({', '.join(used)})"
