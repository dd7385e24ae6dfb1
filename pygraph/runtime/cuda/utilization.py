"""The processes that keep a GPU busy, as its driver's management library (NVML) sees them."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import torch

_SECOND = 1_000_000  # in NVML's microseconds


def busy_processes(device: torch.device) -> str | None:
    """Other processes that have used a GPU's multiprocessors in the last second, in words.

    NVML is part of cuda-bindings from 13.1 on. Containers may hide other processes, and some GPUs count none; then
    nothing is known.

    Returns:
        How many there are; None if there are none, or that cannot be known.
    """
    try:
        nvml: Any = importlib.import_module("cuda.bindings.nvml")
    except ImportError:
        return None
    try:
        nvml.init_v2()
        try:
            busy = _busy(nvml, device)
        finally:
            nvml.shutdown()
    except (nvml.NvmlError, RuntimeError):  # not supported, no permission, no samples; or there is no library
        return None
    count = len(busy - {os.getpid()})
    return None if not count else f"{count} other process{'es' * (count > 1)} kept the device busy"


def _busy(nvml: Any, device: torch.device) -> set[int]:
    """The processes with samples of use in the last second."""
    # Torch leaves the type of properties out. Checked with torch 2.11 and 2.13.
    uuid: str = str(torch.cuda.get_device_properties(device).uuid)  # pyright: ignore
    handle = nvml.device_get_handle_by_uuid(f"GPU-{uuid}")
    running = {int(one.pid) for one in nvml.device_get_compute_running_processes_v3(handle)}
    now = int(time.time() * 1e6)
    samples = nvml.device_get_process_utilization(handle, now - _SECOND)
    # Behind the samples, cuda-bindings 13.3 has more of them that were never written.
    return {
        int(one.pid)
        for one in samples
        if int(one.pid) in running and 0 < one.sm_util <= 100 and now - _SECOND <= one.time_stamp <= now + _SECOND
    }
