"""Nested tensors of the emulated device, in torch's strided layout, as `torch.nn.TransformerEncoder` makes them.

Their rows are in one buffer in memory of the device, and their sizes are on the host, as on CUDA. An operation runs as
the CPU kernel on nested CPU tensors over the same buffers; its results are copied to the device. Operations that make
a nested tensor, or are given one, look at its sizes on the host, so a recording refuses them.
"""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Final

import torch

from pygraph.runtime.emulated.tensors import CPU_KEYS, allocate, host_view, is_emulated

aten: Final = torch.ops.aten
NESTED_CPU_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.NestedTensorCPU)
GEOMETRY: Final = (
    aten._nested_tensor_size.default,
    aten._nested_tensor_strides.default,
    aten._nested_tensor_storage_offsets.default,
)
"""Operations that read a nested tensor's geometry, in the order in which a view of a buffer takes it."""


def is_nested(value: object) -> bool:
    """Whether a value is a nested tensor of the device in the strided layout."""
    return is_emulated(value) and value.is_nested and value.layout == torch.strided  # pyright: ignore  # not jagged


def nested_host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A nested CPU tensor over the memory of a nested tensor of the device."""
    buffer = allocate((0,), (1,), tensor.dtype)
    storage = tensor.untyped_storage()
    length = storage.nbytes() // tensor.element_size()
    aten.set_.source_Storage_storage_offset.redispatch(CPU_KEYS, buffer, storage, 0, (length,), (1,))
    return _over(host_view(buffer), tensor)


def nested_to_device(result: torch.Tensor) -> torch.Tensor:
    """A copy of a nested CPU tensor in memory of the device."""
    result = result.contiguous()
    values = result.values()
    buffer = allocate((values.numel(),), (1,), values.dtype)
    host_view(buffer).copy_(values.view(-1))
    return _over(buffer, result)


def _over(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A nested tensor over a buffer, with the sizes, strides and offsets of another one; these are on the host."""
    geometry = (op.redispatch(NESTED_CPU_KEYS, like) for op in GEOMETRY)
    return aten._nested_view_from_buffer.default.redispatch(CPU_KEYS, buffer, *geometry)
