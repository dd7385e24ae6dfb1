"""The report of one kind of call: its arguments, what it runs, and what that costs."""

from __future__ import annotations

import dataclasses
from typing import Any

from pygraph.ir.descriptors import Fallback, Region
from pygraph.ir.outline import Outline
from pygraph.report.profile import Profile


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
        baked: Texts of the values that are part of the trace, by the paths of arguments.
        seconds: The time that its trace and recording have taken.
        outline: The Program as far as a picture shows it; None if there is none.
        profile: Kernel times by source line, or why there are none; None if nobody has asked for them.
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
    baked: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    seconds: float = 0.0
    outline: Outline | None = dataclasses.field(default=None, repr=False, compare=False)
    profile: Profile | str | None = None

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

    @property
    def between_graphs(self) -> list[str]:
        """For each region that is no graph, what it takes of a call, as it was measured."""
        lines: list[str] = []
        for region in self.regions:
            if region.selection is None and region.times and not self.differentiated:
                why = ", ".join(filter(None, (region.reason or "work of the host", region.source)))
                time = f"{region.times[0][1]:.1f} µs of the host, waiting included"
                lines.append(f"region {region.index} is no graph ({why}): {time}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to plain data."""
        return {
            "function": self.function,
            "arguments": list(self.arguments),
            "baked": dict(self.baked),
            "seconds": self.seconds,
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
            "profile": self.profile.to_dict() if isinstance(self.profile, Profile) else self.profile,
        }  # fmt: skip


# Arguments that a table shows; a backward may take hundreds. The plain data has all.
_MOST_ARGUMENTS = 4

NO_COUNTS = {"kernels": 0, "kernels_in_graphs": 0, "nodes": 0, "patched_nodes": 0, "bytes_copied_per_replay": 0}

NO_MECHANISMS = {"host": 0, "device": 0, "table": 0, "copy": 0}

MEMORY_TITLES = {
    "pool": "pool (all graphs share it)",
    "static": "captured, in place",
    "copied": "staging buffers",
    "outputs": "results per call",
}

NO_MEMORY = dict.fromkeys(MEMORY_TITLES, 0)
