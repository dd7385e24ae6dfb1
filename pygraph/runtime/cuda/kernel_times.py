"""Times of kernels on a CUDA device, as torch's profiler measures them, by the operations that have launched them.

The profiler tells when the host has launched each kernel, by a number that both events have; where it has not seen the
launch itself (of CUDA's driver it shows a few), by that of torch's operation around it. Ranges of our own tell between
which times the host was at each operation.
"""

# The events of which `torch.profiler` makes its own have no public name. Checked with torch 2.11 and 2.13.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile, record_function

from pygraph.runtime.cuda.timing import synchronize
from pygraph.runtime.driver import KernelTime

_RANGE = "pygraph operation "

_CALL = re.compile(r"cu(da)?[A-Z]\w*")
"""Names of CUDA's own functions, whose numbers are others than those of torch's operations."""


class _Ranges:
    """The ranges of the operations of one run, of which one is open at a time."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._open: record_function | None = None

    def mark(self, op: int) -> None:
        """Close the range of the operation before, and open that of this one."""
        self.close()
        self._open = record_function(f"{_RANGE}{self._run} {op}").__enter__()

    def close(self) -> None:
        """Close the range that is open, if one is."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def kernel_times(
    run: Callable[[Callable[[int], None]], object], restore: Callable[[], object], count: int, device: torch.device
) -> list[list[KernelTime]]:
    """The kernels of each run; see `Driver.kernel_times`."""
    restore()
    run(lambda op: None)
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        for index in range(count):
            restore()
            ranges = _Ranges(index)
            try:
                run(ranges.mark)
            finally:
                ranges.close()
        synchronize(device)
    profiler: Any = found.profiler
    return attributed(profiler.kineto_results.events(), count)


def attributed(events: Iterable[Any], count: int) -> list[list[KernelTime]]:
    """The kernels among a profiler's events, by the run and the operation in whose range they were launched.

    Args:
        events: The events, those of the host and those of the device.
        count: The number of runs.
    """
    ranges: list[tuple[int, int, int, int]] = []  # begin, end, run, operation
    launches: dict[int, int] = {}
    operations: dict[int, int] = {}
    kernels: list[Any] = []
    for event in events:
        name: str = event.name()
        if event.device_type() == DeviceType.CUDA:
            if not event.is_user_annotation():  # which shows the ranges once more
                kernels.append(event)
        elif name.startswith(_RANGE):
            run, op = name.removeprefix(_RANGE).split(" ")
            ranges.append((event.start_ns(), event.end_ns(), int(run), int(op)))
        elif not event.is_user_annotation():
            (launches if _CALL.fullmatch(name) else operations)[event.correlation_id()] = event.start_ns()
    ranges.sort()
    found: list[list[tuple[int, KernelTime]]] = [[] for _ in range(count)]
    for event in kernels:
        launched = launches.get(event.correlation_id(), operations.get(event.linked_correlation_id()))
        position = -1 if launched is None else bisect.bisect(ranges, (launched + 1,)) - 1
        if launched is None or position < 0 or launched > ranges[position][1]:
            continue  # of a restoration, or of other threads
        _, _, run, op = ranges[position]
        found[run].append((launched, KernelTime(op, event.name(), event.duration_ns() / 1e3)))
    return [[kernel for _, kernel in sorted(run, key=lambda one: one[0])] for run in found]
