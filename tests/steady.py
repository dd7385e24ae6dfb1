"""A measure by which `select` chooses the same way in every run: on CUDA, where it would take times, graphs win."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_RUNS = 3
"""As many as of the emulated device's measure: what a run finds of an earlier one shows."""


def measure(driver: Any, run: Callable[[], object]) -> float:
    """Stands for ``CudaDriver.measure``: patched graphs before copies, and both before ordinary launches."""
    for _ in range(_RUNS - 1):
        run()
    replays, copies = driver.counters.replays, driver.counters.copies
    run()
    return 1.0 + driver.counters.copies - copies if driver.counters.replays > replays else 100.0
