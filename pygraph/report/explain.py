"""What runs how, and why: the report of a transformed function."""

from __future__ import annotations

import collections
import dataclasses
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pygraph.native import build
from pygraph.program import Fallback, Region

if TYPE_CHECKING:
    from pygraph.transformed import Entry


@dataclasses.dataclass(frozen=True)
class CallReport:
    """How one kind of call runs."""

    arguments: tuple[str, ...]
    counts: dict[str, int]
    regions: tuple[Region, ...]
    fallbacks: tuple[Fallback, ...]
    calls: int

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "arguments": list(self.arguments),
            **self.counts,
            "regions": [
                {
                    "kind": region.kind, "way": region.way, "reason": region.reason, "source": region.source,
                    "times_us": dict(region.times),
                }
                for region in self.regions
            ],
            "fallbacks": [{**dataclasses.asdict(fallback), "count": self.calls} for fallback in self.fallbacks],
            "calls": self.calls,
        }  # fmt: skip


_NO_COUNTS = {"kernels": 0, "kernels_in_graphs": 0, "nodes": 0, "patched_nodes": 0, "bytes_copied_per_replay": 0}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The report of a transformed function; ``str()`` is a table, ``to_dict()`` plain data.

    Attributes:
        name: The function.
        calls: One report per kind of call, least recently used first.
        inlined: Calls that became part of something else, or ran as they are without a cache entry.
        slow_calls: Why the extension does not serve calls, so that each costs some time in Python; None if it does.
    """

    name: str
    calls: tuple[CallReport, ...]
    inlined: dict[Fallback, int]
    slow_calls: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The most recent kind of call at the top level, all kinds under ``entries``, every fallback counted."""
        counted: collections.Counter[Fallback] = collections.Counter(self.inlined)
        for call in self.calls:
            for fallback in call.fallbacks:
                counted[fallback] += call.calls
        latest: dict[str, Any] = {"arguments": [], **_NO_COUNTS, "regions": [], "calls": 0}
        if self.calls:
            latest = self.calls[-1].to_dict()
        return {
            "name": self.name,
            **latest,
            "fallbacks": [{**dataclasses.asdict(fallback), "count": count} for fallback, count in counted.items()],
            "entries": [call.to_dict() for call in self.calls],
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
            regions = ", ".join(f"{region.kind}:{region.way}" for region in call.regions) or "as it is"
            table.add_row(
                Text(", ".join(call.arguments)), str(call.calls), str(counts["kernels"]),
                str(counts["kernels_in_graphs"]), str(counts["nodes"]), str(counts["patched_nodes"]),
                str(counts["bytes_copied_per_replay"]), regions,
            )  # fmt: skip
        console.print(table)
        for region_call in self.calls:
            for region in region_call.regions:
                if region.times:
                    times = ", ".join(f"{way} {time} µs" for way, time in region.times)
                    console.print(Text(f"region {region.index} runs by {region.way}: {times}"))
        for fallback in self.to_dict()["fallbacks"]:
            where = f" ({fallback['source']})" if fallback["source"] else ""
            console.print(Text(f"fallback ×{fallback['count']}: {fallback['what']}: {fallback['reason']}{where}"))
        if not self.to_dict()["fallbacks"]:
            console.print("no fallbacks")
        if self.slow_calls is not None:
            console.print(Text(f"calls are recognised in Python: {self.slow_calls}"))
        return text.getvalue()

    __repr__ = __str__


def explain(name: str, entries: Sequence[Entry], inlined: dict[Fallback, int]) -> Explanation:
    """Make the report of a function from its cache entries and the calls that had none."""
    return Explanation(name, tuple(map(call_report, entries)), inlined, build.reason())


def call_report(entry: Entry) -> CallReport:
    """Make the report of one kind of call."""
    from pygraph.evaluate import argument_descriptors
    from pygraph.program import Argument

    program = entry.program or entry.described
    arguments: list[str] = []
    if program is not None:
        for descriptor in argument_descriptors(program):
            kind = descriptor.spec if isinstance(descriptor, Argument) else descriptor.type.__name__
            arguments.append(f"{descriptor.path}: {kind}")
    counts = dict(_NO_COUNTS)
    if entry.executable is not None:
        counts = entry.executable.counts()
    elif program is not None:
        from pygraph.transforms.graphify import kernels

        counts["kernels"] = kernels(program.nodes)
    regions = program.regions if program is not None else ()
    fallbacks = entry.fallbacks if entry.executable is None else entry.executable.fallbacks
    return CallReport(tuple(arguments), counts, regions, tuple(fallbacks), entry.calls)
