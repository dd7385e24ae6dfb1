"""The work of an iteration as torch's profiler saw it: kernels, how many of them graphs launched, and copies.

The profiler's trace has an event for every kernel, copy and fill on the device, and one for every call of the driver or
the runtime that launched something. The two have the same ``correlation``; all that one launch of a graph runs has the
correlation of that launch.
"""

from __future__ import annotations

import collections
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table.setting import Iteration

ITERATIONS = 4
"""Iterations that a profile holds."""

LONGEST = 12
"""Kernels that are listed by name: those that take the most time."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"Launch|Memcpy|Memset", re.IGNORECASE)
_COPY = re.compile(r"copy|clone", re.IGNORECASE)

Event = Mapping[str, Any]


def profile(run: Iteration, batches: Sequence[Any]) -> dict[str, Any]:
    """Profile some iterations on the CUDA device, see `summary`."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    run(batches[0])
    torch.cuda.synchronize()
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for i in range(ITERATIONS):
            run(batches[i % len(batches)])
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)["traceEvents"]
    return summary(events, ITERATIONS)


def summary(events: Iterable[Event], iterations: int) -> dict[str, Any]:
    """Numbers per iteration of a trace.

    Args:
        events: The events of a trace in Chrome's format, as torch exports it.
        iterations: How many iterations it holds.

    Returns:
        ``kernels``; ``coverage`` and ``coverage_time``, the shares of kernels and of their time that graphs launched,
        null if there are none; ``graph_launches``; ``busy_us``, when anything ran on the device; ``copied``, number
        and bytes of copies by kind; ``copy_kernels`` and ``copy_kernels_us``, kernels with a name of copies;
        ``unattributed``, kernels of which the trace does not show what launched them: they count as not in graphs;
        ``longest``, name, number and microseconds of the kernels that take the most time together.
    """
    calls: dict[Any, list[str]] = collections.defaultdict(list)
    work: list[Event] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        kind = str(event.get("cat", "")).lower()
        if kind in _CALLS:
            calls[_correlation(event)].append(str(event.get("name")))
        elif kind in _ON_DEVICE:
            work.append(event)
    sizes = collections.Counter(_correlation(event) for event in work)
    kernels = [event for event in work if event["cat"].lower() == "kernel"]
    launchers = [_launcher(event, calls, sizes) for event in kernels]
    in_graphs = [event for event, launcher in zip(kernels, launchers, strict=True) if launcher == "graph"]
    copies = [event for event in kernels if _COPY.search(str(event.get("name")))]
    graphs = {_correlation(event) for event in in_graphs}
    return {
        "kernels": len(kernels) / iterations,
        "coverage": _share(len(in_graphs), len(kernels)),
        "coverage_time": _share(_time(in_graphs), _time(kernels)),
        "graph_launches": len(graphs) / iterations,
        "busy_us": round(_busy(work) / iterations, 1),
        "kernels_us": round(_time(kernels) / iterations, 1),
        "copied": _copied(work, iterations),
        "copy_kernels": len(copies) / iterations,
        "copy_kernels_us": round(_time(copies) / iterations, 1),
        "unattributed": launchers.count("unknown") / iterations,
        "longest": _longest(kernels, iterations),
    }


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


def _launcher(event: Event, calls: Mapping[Any, list[str]], sizes: Mapping[Any, int]) -> str:
    """What launched a kernel: a ``graph``, a ``call``, or ``unknown``.

    The call that launched it says so. Not every version of the profiler records ``cuGraphLaunch``: then a kernel with
    the number of a graph's node is a graph's, and so are several kernels with one correlation, as ordinary launches
    have one each.
    """
    correlation = _correlation(event)
    names = [name for name in calls.get(correlation, ()) if _LAUNCH.search(name)]
    if names:
        return "graph" if any("GraphLaunch" in name for name in names) else "call"
    if any(event.get("args", {}).get(key) for key in ("graph id", "graph node id")):
        return "graph"
    return "graph" if correlation is not None and sizes[correlation] > 1 else "unknown"


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _time(events: Iterable[Event]) -> float:
    return sum(float(event.get("dur", 0.0)) for event in events)


def _busy(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of the events ran."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0.0))) for e in events):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _longest(kernels: Iterable[Event], iterations: int) -> list[list[Any]]:
    by_name: dict[str, list[Event]] = collections.defaultdict(list)
    for event in kernels:
        by_name[str(event.get("name"))[:120]].append(event)
    longest = sorted(by_name.items(), key=lambda item: -_time(item[1]))[:LONGEST]
    return [[name, len(events) / iterations, round(_time(events) / iterations, 1)] for name, events in longest]


def _copied(events: Iterable[Event], iterations: int) -> dict[str, list[float]]:
    """Number and bytes of copies per iteration, by kind such as ``DtoD``."""
    found: dict[str, list[float]] = {}
    for event in events:
        if event["cat"].lower() == "gpu_memcpy":
            words = str(event.get("name")).split()
            one = found.setdefault(words[1] if len(words) > 1 else "other", [0.0, 0.0])
            one[0] += 1 / iterations
            one[1] += float(event.get("args", {}).get("bytes", 0)) / iterations
    return found


def bytes_per_iteration(before: Iterable[Event], after: Iterable[Event], iterations: int) -> float | None:
    """Bytes that pygraph says it copied per iteration, from the entries of two of its reports.

    Args:
        before: Entries of ``explain().to_dict()["entries"]`` before some iterations.
        after: Entries after them.
        iterations: How many there were.

    Returns:
        The bytes; null if no calls have been counted.
    """

    def key(entry: Event) -> tuple[Any, ...]:
        return entry["function"], *entry["arguments"]

    def counted(entries: Iterable[Event]) -> dict[Any, list[Event]]:
        found: dict[Any, list[Event]] = collections.defaultdict(list)
        for entry in entries:
            if not entry["differentiated"]:
                found[key(entry)].append(entry)
        return found

    earlier = counted(before)
    copied = calls = 0
    for name, entries in counted(after).items():
        more = sum(entry["calls"] for entry in entries) - sum(entry["calls"] for entry in earlier.get(name, ()))
        calls += more
        copied += more * max(entry["bytes_copied_per_replay"] for entry in entries)
    return copied / iterations if calls else None
