"""Freeing what tests have left, and how much memory of a device is then in use."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # checked with torch 2.11 and 2.13

from pygraph.runtime.devices import driver_for
from pygraph.runtime.emulated.tensors import allocator


def free_objects() -> None:
    """Free the garbage of all tests so far, and half of what stays: torch's cache of results on fake tensors."""
    gc.unfreeze()
    FakeTensorMode.cache_clear()
    gc.collect()


def live_bytes(device: torch.device) -> int:
    """The bytes in use: after a collection, the queued work, and the last backward's task in autograd's thread."""
    driver = driver_for(device)
    assert driver is not None
    gc.collect()
    _let_autograd_finish(device)
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    driver.synchronize()
    return driver.live_bytes()


def _let_autograd_finish(device: torch.device) -> None:
    """Have autograd's thread for the device do something that needs no memory.

    It reports a backward as done before it lets go of the node that it ran last, whose tensors so live a little longer,
    until the next task at the latest.
    """
    nothing = torch.empty(0, device=device, requires_grad=True)
    with torch.enable_grad():
        torch.autograd.grad(nothing * 1, nothing, torch.empty(0, device=device))


@contextlib.contextmanager
def peak_followed(device: torch.device) -> Generator[list[int], None, None]:
    """Follow the most bytes in use at once, from now on: the first number of the list, at the end."""
    found = [0]
    driver = driver_for(device)
    assert driver is not None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found[0] = torch.cuda.max_memory_allocated(device)
        return
    allocate = allocator.allocate

    def allocate_and_note(*args: Any, **kwargs: Any) -> Any:
        memory = allocate(*args, **kwargs)
        found[0] = max(found[0], driver.live_bytes())
        return memory

    allocator.allocate = allocate_and_note
    try:
        yield found
    finally:
        del allocator.allocate
