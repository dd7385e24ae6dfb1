"""Timing on a CUDA device: of its own work, and of calls from the host."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from pygraph.runtime.cuda import captures
from pygraph.runtime.driver import Run


def synchronize(device: torch.device) -> None:
    """Wait for a device; not while another thread captures, which such a wait would break."""
    with captures.exclusive():
        torch.cuda.synchronize(device)


def device_time(run: Callable[[], object], device: torch.device, restore: Callable[[], object] | None = None) -> float:
    """Microseconds that the device needs for ``run()``: median of a few, by events, each after a ``restore()``.

    Less what events themselves take, which is as long as a short kernel.
    """
    return max(_between_events(run, device, restore) - _time_of_events(device), 0.0)


@functools.cache
def _time_of_events(device: torch.device) -> float:
    """Microseconds between two events with nothing between them."""
    return _between_events(lambda: None, device)


def _between_events(
    run: Callable[[], object], device: torch.device, restore: Callable[[], object] | None = None
) -> float:
    times: list[float] = []
    host = 0.0
    with torch.cuda.device(device):  # events are recorded on its current stream
        for index in range(6):
            if restore is not None:
                restore()
            host, start, end = _launch_behind_sleep(run, host)
            end.synchronize()
            if index:  # the first one warms up
                times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def wall_time(run: Callable[[], object], device: torch.device) -> float:
    """Median microseconds of a call in a row of calls: the larger of what the host and the device need.

    Runs that must be prepared are timed one by one, which comes to the same.
    """
    if isinstance(run, Run) and run.restore is not None:
        with torch.cuda.device(device):
            return _time_of_prepared(run, device)
    for _ in range(3):
        run()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    once = time.perf_counter() - start
    count = max(1, min(20, int(0.01 / max(once, 1e-6))))
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            run()
        synchronize(device)
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3  # seconds
_CYCLES = 2e9  # that a device counts in a second, at most about
_MOST_RUNS, _FEWEST_RUNS, _BUDGET = 25, 5, 0.05  # the last in seconds


def _time_of_prepared(run: Run, device: torch.device) -> float:
    """The larger of the median times that the host and the device need for a run, in microseconds.

    Longer runs than the longest sleep have gaps on the device, and there the host's time is what counts.
    """
    started = time.perf_counter()
    hosts: list[float] = []
    devices: list[float] = []
    host = 0.0
    for index in range(_MOST_RUNS + 1):
        if index > _FEWEST_RUNS and time.perf_counter() - started > _BUDGET:
            break
        run.prepare()
        host, start, end = _launch_behind_sleep(run.timed, host)
        synchronize(device)
        if index:  # the first one warms up
            hosts.append(host * 1e6)
            devices.append(start.elapsed_time(end) * 1e3)
    return max(statistics.median(hosts), statistics.median(devices))


def _launch_behind_sleep(
    run: Callable[[], object], expected: float
) -> tuple[float, torch.cuda.Event, torch.cuda.Event]:
    """Launch a run while the device sleeps, so that it sees no gaps in which it waits for the host.

    Args:
        run: The run.
        expected: Seconds that the host needed for it the last time; zero if that is not known.

    Returns:
        Seconds that the host needed, and events before and after the run.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sleep = min(1.5 * expected + _SHORTEST_SLEEP, _LONGEST_SLEEP)
    # It has no public name; torch's own tests use it to keep a stream busy. Checked with torch 2.13.
    torch.cuda._sleep(int(sleep * _CYCLES))  # pyright: ignore
    start.record()
    before = time.perf_counter()
    run()
    host = time.perf_counter() - before
    end.record()
    return host, start, end
