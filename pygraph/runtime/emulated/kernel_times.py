"""Times of the emulated device's kernels: those that the host has needed to run them, as nothing else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pygraph.runtime.driver import KernelTime
from pygraph.runtime.emulated import launches


class _Clock:
    """Times each launch from the launch before, or from the begin of its operation."""

    def __init__(self) -> None:
        self.found: list[KernelTime] = []
        self._op, self._last = -1, time.perf_counter()
        self._thread = threading.get_ident()

    def mark(self, op: int) -> None:
        """Note that an operation begins."""
        self._op, self._last = op, time.perf_counter()

    def note(self, name: str) -> None:
        """Note that a kernel has run, unless another thread has launched it."""
        if threading.get_ident() != self._thread:
            return
        now = time.perf_counter()
        self.found.append(KernelTime(self._op, name, (now - self._last) * 1e6))
        self._last = now


def kernel_times(
    run: Callable[[Callable[[int], None]], object], restore: Callable[[], object], count: int
) -> list[list[KernelTime]]:
    """The kernels of each run; see `Driver.kernel_times`."""
    runs: list[list[KernelTime]] = []
    for _ in range(1 + count):
        restore()
        clock, before = _Clock(), launches.observer
        launches.set_observer(clock.note)
        try:
            run(clock.mark)
        finally:
            launches.set_observer(before)
        runs.append(clock.found)
    return runs[1:]
