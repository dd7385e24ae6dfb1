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
        library: Any = importlib.import_module("cuda.bindings.nvml")
    except ImportError:
        return None
    try:
        library.init_v2()
        try:
            busy = _busy(library, device)
        finally:
            library.shutdown()
    except (library.NvmlError, RuntimeError):  # not supported, no permission, no samples; or there is no library
        return None
    # In a container our process has another number than for the driver, which then counts us among the others.
    others = len(busy) - 1 if os.getpid() not in busy else len(busy - {os.getpid()})
    return None if others <= 0 else f"{others} other process{'es' * (others > 1)} kept the device busy"


def _busy(nvml: Any, device: torch.device) -> set[int]:
    """The processes with samples of use in the last second."""
    # Torch leaves the type of properties out. Checked with torch 2.11 and 2.13.
    uuid: str = str(torch.cuda.get_device_properties(device).uuid)  # pyright: ignore
    handle = nvml.device_get_handle_by_uuid(f"GPU-{uuid}")
    since = int(time.time() * 1e6) - _SECOND
    samples = nvml.device_get_process_utilization(handle, since)
    return {int(one.pid) for one in samples if one.sm_util > 0 and one.time_stamp >= since}
