"""Wall and CPU time of an iteration, of several ways in turns."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from benchmarks.reporting import quartiles
from benchmarks.table.setting import Iteration

ROUNDS = 9
"""Rounds of measuring; in each, every way runs for the same time."""

MOST_SUBMITTED = 10
"""Iterations that are submitted to an empty queue to measure the time of the CPU."""

_WARM_UP = 2
_FEWEST = 4
_FEWEST_LONG = 2
_LONG = 0.02
"""Seconds of an iteration of which a round has fewer."""


class Meter:
    """One way being measured.

    Args:
        run: One iteration.
        batches: Its batches, which are used in turn.
        wait: Waits until the device has done everything.
    """

    def __init__(self, run: Iteration, batches: Sequence[Any], wait: Callable[[], None]) -> None:
        self._run, self._batches, self._wait = run, itertools.cycle(batches), wait
        self._count = _FEWEST
        self._wall: list[float] = []
        self._cpu: list[float] = []

    def calibrate(self, seconds: float) -> None:
        """Warm up, and choose how many iterations a round has."""
        self._timed(_FEWEST)
        one = min(self._timed(_FEWEST), self._timed(_FEWEST)) / _FEWEST
        self._count = min(max(_FEWEST_LONG if one > _LONG else _FEWEST, int(seconds / one)), 5000)

    def round(self) -> None:
        """Measure iterations in a row, and the submission of a few to an empty queue."""
        self._timed(_WARM_UP)  # other ways have run meanwhile, and memory was given back
        self._wall.append(self._timed(self._count) / self._count)
        few = min(self._count, MOST_SUBMITTED)
        self._cpu.append(self._timed(few, until_done=False) / few)
        self._wait()

    def _timed(self, count: int, until_done: bool = True) -> float:
        batches = [next(self._batches) for _ in range(count)]
        run = self._run
        self._wait()
        with _no_collection():
            start = time.perf_counter()
            for batch in batches:
                run(batch)
            if until_done:
                self._wait()
            return time.perf_counter() - start

    def result(self) -> dict[str, Any]:
        """Quartiles in µs, and how many iterations they are of."""
        return {
            "wall_us": quartiles((one * 1e6 for one in self._wall), 1),
            "cpu_us": quartiles((one * 1e6 for one in self._cpu), 1),
            "iterations": len(self._wall) * self._count,
        }


@contextlib.contextmanager
def _no_collection() -> Generator[None, None, None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Meters:
    """Ways of one process being measured; one that fails says so, and does not keep the others from going on.

    Args:
        runs: One iteration of each way.
        batches: Their batches.
        wait: Waits until the device has done everything.
    """

    def __init__(self, runs: Mapping[str, Iteration], batches: Sequence[Any], wait: Callable[[], None]) -> None:
        self._meters = {name: Meter(run, batches, wait) for name, run in runs.items()}
        self._errors: dict[str, str] = {}

    def calibrate(self, seconds: float) -> None:
        """Warm up, and choose how many iterations a round of these seconds has for each way."""
        self._for_each(lambda meter: meter.calibrate(seconds))

    def round(self) -> None:
        """Measure every way once."""
        gc.collect(1)  # what iterations left; all that a compilation holds would take longer than a round
        self._for_each(Meter.round)

    def _for_each(self, action: Callable[[Meter], None]) -> None:
        for name, meter in list(self._meters.items()):
            try:
                action(meter)
            except Exception as error:  # says so in its column
                self._errors[name] = f"measuring: {type(error).__name__}: {error}"[:600]
                del self._meters[name]

    def result(self) -> dict[str, dict[str, Any]]:
        """The times of each way so far, or its error."""
        times: dict[str, dict[str, Any]] = {name: meter.result() for name, meter in self._meters.items()}
        return times | {name: {"error": text} for name, text in self._errors.items()}
