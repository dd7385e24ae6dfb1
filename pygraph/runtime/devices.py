"""The devices of this process, and the driver of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from pygraph.errors import DeviceError, describe
from pygraph.runtime.driver import Driver

_drivers: dict[torch.device, Driver] = {}


def default_device() -> torch.device:
    """The device to put tensors on: ``cuda`` where there is one, else the emulated device.

    The environment variable ``PYGRAPH_DEVICE`` (``cuda`` or ``emulated``) overrides the choice. Asking for the
    emulated device registers it with torch; nothing is registered before.

    Raises:
        DeviceError: ``PYGRAPH_DEVICE`` names a device that is not there.

    Example:
        >>> import torch, pygraph
        >>> torch.ones(2, device=pygraph.default_device()).sum().item()
        2.0
    """
    choice = os.environ.get("PYGRAPH_DEVICE", "")
    if choice.startswith("cuda") or (not choice and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise DeviceError(
                describe(
                    "default_device()", f"PYGRAPH_DEVICE={choice}, but torch sees no CUDA device",
                    remedy="Install a driver and a CUDA build of torch, or use PYGRAPH_DEVICE=emulated.",
                )
            )  # fmt: skip
        return torch.device(choice) if ":" in choice else torch.device("cuda", torch.cuda.current_device())
    if choice not in ("", "emulated", "emu"):
        raise DeviceError(describe("default_device()", f"PYGRAPH_DEVICE={choice}", expected="'cuda' or 'emulated'"))
    from pygraph.runtime.emulated import driver as emulated

    return emulated.driver().device


def hold_accumulators(tensors: Sequence[torch.Tensor]) -> object:
    """Have leaves' gradient accumulators exist as long as the returned object does, where making them can deadlock.

    torch makes one with the leaf's mutex held. On the emulated device it asks the device guard for a stream, which is
    in Python: it waits for the interpreter. A thread that applies a Function holds the interpreter and waits for the
    mutex, unless there is an accumulator already. Operations of torch's make it without holding the interpreter.
    """
    if _EMULATED not in sys.modules:
        return None
    return [x.view_as(x) for x in tensors if x.device.type == "emu" and x.requires_grad and x.is_leaf]


_EMULATED = "pygraph.runtime.emulated.driver"


def driver_for(device: torch.device) -> Driver | None:
    """The driver of a device, made on first use; None for a device without graphs."""
    driver = _drivers.get(device)
    if driver is None:
        if device.type == "cuda":
            from pygraph.runtime.cuda.driver import CudaDriver

            driver = CudaDriver(device)
        elif device.type == "emu":
            from pygraph.runtime.emulated import driver as emulated

            driver = emulated.driver()
        else:
            return None
        _drivers[device] = driver
    return driver
