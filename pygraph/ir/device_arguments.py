"""Devices as arguments of torch's functions: which one is meant."""

from __future__ import annotations

from typing import Any

import torch


def or_default(device: Any) -> torch.device:
    """A device, or the default one if it is None."""
    return torch.get_default_device() if device is None else torch.device(device)


def with_index(device: Any) -> torch.device:
    """A device with its index, that of the current one if it has none; a number is one of CUDA's."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())
