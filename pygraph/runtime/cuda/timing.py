"""Timing on a CUDA device: of its own work, and of calls from the host."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from pygraph.runtime.cuda import captures
from pygraph.runtime.driver import Run
from pygraph.runtime.samples import Sample


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
            host, _, start, end = _launch_behind_sleep(run, host)
            end.synchronize()
            if index:  # the first one warms up
                times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3  # seconds
_CYCLES = 2e9  # that a device counts in a second, at most about
_ROW, _MOST_IN_A_ROW = 200e-6, 20  # seconds of a row of runs that are timed together, and how many there are at most


def sample(run: Run, device: torch.device, *, latency: bool = False) -> Sample:
    """Time a run on the host and on the device, apart.

    The device sleeps until the host has launched everything, so that it shows no gaps in which it waits for the host.
    Runs that need no preparation are repeated if they are short: the first call after a pause is slower than others.
    Launches that take longer than the longest sleep have gaps; then the host's time is what counts.
    """
    with torch.cuda.device(device):
        run.prepare()
        host, *_ = _launch_behind_sleep(run.timed, 0.0)
        synchronize(device)
        count = 1 if run.restore is not None else max(1, min(_MOST_IN_A_ROW, int(_ROW / max(host, 1e-6))))
        run.prepare()
        host, asleep, start, end = _launch_behind_sleep(_row(run.timed, count), count * host)
        synchronize(device)
        return Sample(
            host=host / count * 1e6,
            device=start.elapsed_time(end) / count * 1e3,
            latency=_latency(run, device) if latency else None,
            clock=asleep.cycles / max(asleep.begin.elapsed_time(start) * 1e3 - _time_of_events(device), 1.0),
        )


def _row(run: Callable[[], object], count: int) -> Callable[[], object]:
    if count == 1:
        return run

    def runs() -> None:
        for _ in range(count):
            run()

    return runs


def _latency(run: Run, device: torch.device) -> float:
    """Microseconds from the start of a run on an idle device until all is done."""
    run.prepare()
    synchronize(device)
    start = time.perf_counter()
    run.timed()
    synchronize(device)
    return (time.perf_counter() - start) * 1e6


class _Sleep(NamedTuple):
    """A sleep of the device: how many cycles of its clock it takes, and the event before it."""

    cycles: int
    begin: torch.cuda.Event


def _launch_behind_sleep(
    run: Callable[[], object], expected: float
) -> tuple[float, _Sleep, torch.cuda.Event, torch.cuda.Event]:
    """Launch a run while the device sleeps, so that it sees no gaps in which it waits for the host.

    Args:
        run: The run.
        expected: Seconds that the host needed for it the last time; zero if that is not known.

    Returns:
        Seconds that the host needed, the sleep, and events before and after the run.
    """
    begin, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    cycles = int(min(1.5 * expected + _SHORTEST_SLEEP, _LONGEST_SLEEP) * _CYCLES)
    begin.record()
    # It has no public name; torch's own tests use it to keep a stream busy. Checked with torch 2.11 and 2.13.
    torch.cuda._sleep(cycles)  # pyright: ignore
    start.record()
    before = time.perf_counter()
    run()
    host = time.perf_counter() - before
    end.record()
    return host, _Sleep(cycles, begin), start, end
