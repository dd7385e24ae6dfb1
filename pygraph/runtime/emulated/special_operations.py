"""Operations of the emulated device that are no launches: allocation, resizing, copies, reading a number."""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

from pygraph.ir.descriptors import contiguous_strides
from pygraph.runtime.emulated import launches
from pygraph.runtime.emulated.tensors import CPU_KEYS, NAME, allocate, host_view, is_emulated, span_bytes
from pygraph.runtime.emulated.traits import Op

aten: Final = torch.ops.aten


def _check_index(device: torch.device | None) -> None:
    if device is not None and device.index not in (None, 0):
        raise RuntimeError(f"{NAME} error: invalid device ordinal: there is no {device}")


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    if layout not in (None, torch.strided):
        raise RuntimeError(f"{NAME} tensors are strided; got {layout}")
    _check_index(device)
    dtype = dtype or torch.get_default_dtype()
    if memory_format in (None, torch.contiguous_format):
        stride = contiguous_strides(tuple(size))
    else:
        stride = torch.empty(size, memory_format=memory_format, device="meta").stride()
    return allocate(size, stride, dtype)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> torch.Tensor:
    _check_index(device)
    return allocate(size, stride, dtype or torch.get_default_dtype())


def set_memory(
    tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, *geometry: Sequence[int]
) -> torch.Tensor:
    """Make a tensor a view of a storage."""
    return aten.set_.source_Storage_storage_offset.redispatch(CPU_KEYS, tensor, storage, offset, *geometry)


def resize(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Give a tensor another size, and more memory if it needs more."""
    if tuple(size) == tuple(tensor.shape) and memory_format is None:
        return tensor
    if memory_format in (None, torch.contiguous_format):
        stride = contiguous_strides(tuple(size))
    else:
        stride = torch.empty(size, memory_format=memory_format, device="meta").stride()
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    needed = offset * tensor.element_size() + span_bytes(size, stride, tensor.dtype)
    if needed > storage.nbytes():
        grown = allocate((int(needed),), (1,), torch.uint8)
        old = aten.set_.source_Storage_storage_offset(
            allocate((0,), (1,), torch.uint8), storage, 0, (storage.nbytes(),), (1,)
        )
        if launches.recorder is None:
            host_view(grown)[: storage.nbytes()].copy_(host_view(old))
        storage = grown.untyped_storage()
    return set_memory(tensor, storage, int(offset), size, stride)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not is_emulated(target):
        launches.synchronize("aten::copy_ (device to host)")
        launches.count_copy("aten::copy_", source)
        target.copy_(host_view(source))
    elif not is_emulated(source):
        launches.count_copy("aten::copy_ (host to device)", source)
        host_view(target).copy_(source)
    else:
        if launches.recorder is not None:
            launches.recorder.before([target, source])
        host_view(target).copy_(host_view(source))
        if launches.recorder is not None:
            leaves, spec = pytree.tree_flatten(((target, source), {}))
            launches.recorder.after(launches.Launch("aten::copy_", aten.copy_.default, tuple(leaves), spec, (None,)))
        else:
            launches.count_copy("aten::copy_", source)
    return target


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if is_emulated(target):
        resize(target, source.shape)
    else:
        target.resize_(source.shape)
    return _copy_from(source, target)


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    launches.synchronize("aten::_local_scalar_dense")
    return host_view(tensor).item()


SPECIAL: Final[dict[Op, Callable[..., Any]]] = {
    aten.empty.memory_format: _empty,
    aten.empty_strided.default: _empty_strided,
    aten.resize_.default: resize,
    aten._copy_from.default: _copy_from,
    aten._copy_from_and_resize.default: _copy_from_and_resize,
    aten._local_scalar_dense.default: _local_scalar_dense,
}
