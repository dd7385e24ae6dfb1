"""Pinned memory of the host beside the emulated device: ``tensor.pin_memory()`` and ``DataLoader(pin_memory=True)``.

Whether memory is pinned is asked of its address, as of CUDA's. A backend in Python has no allocator to which torch
(2.11 to 2.13) could turn for it, so ``torch.empty(..., pin_memory=True)`` raises torch's NotImplementedError.
"""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Final

import torch

from pygraph.runtime.emulated.memory import Allocator
from pygraph.runtime.emulated.tensors import NAME, span_bytes

_pinned: Final = Allocator()


def is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """The kernel of ``aten::is_pinned`` for CPU tensors."""
    if device is not None and device.type != NAME:
        return False
    with torch._C.DisableTorchFunction():
        return _pinned.segment_at(tensor.untyped_storage().data_ptr(), 1) is not None


def pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The kernel of ``aten::_pin_memory`` for CPU tensors: a copy, with the same strides, in pinned memory."""
    if device is not None and device.type != NAME:
        raise RuntimeError(f"cannot pin memory for {device}: the accelerator of this process is {NAME}")
    with torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        shape, stride = tuple(tensor.shape), tensor.stride()
        nbytes = span_bytes(shape, stride, tensor.dtype)
        storage = torch.from_numpy(_pinned.allocate(max(1, nbytes))).untyped_storage()
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, 0, shape, stride)  # pyright: ignore
        return copy.copy_(tensor)
