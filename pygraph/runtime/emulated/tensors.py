"""Tensors over the memory of the emulated device, and the same memory as the CPU sees it."""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch.utils.dlpack import to_dlpack

from pygraph.runtime.emulated.memory import Allocator

NAME: Final = "emu"
aten: Final = torch.ops.aten
allocator: Final = Allocator()
helped: Final = threading.Event()
"""Another thread than the main one has allocated, which is how autograd's shows itself."""


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h, with which an (unversioned) DLManagedTensor begins."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DL_CPU: Final = 1
_DL_EXT: Final = 12  # kDLExtDev, which torch takes for PrivateUse1

_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_from_dlpack: Callable[[object], torch.Tensor] = torch._C._from_dlpack  # pyright: ignore
from_pointer: Callable[..., torch.UntypedStorage] = torch._C._construct_storage_from_data_pointer  # pyright: ignore
CPU_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _dl(capsule: object) -> _DLTensor:
    return _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))


@functools.cache
def _dl_dtype(dtype: torch.dtype) -> tuple[int, int]:
    described = _dl(to_dlpack(torch.empty(1, dtype=dtype, device="cpu"))).dtype
    return described.code, described.bits


def span_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first to the end of the last element that the strides reach."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * dtype.itemsize


def allocate(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *, own: bool = True) -> torch.Tensor:
    """An uninitialised tensor of the device."""
    nbytes = span_bytes(shape, stride, dtype)
    if not helped.is_set() and threading.current_thread() is not threading.main_thread():
        helped.set()
    base = (
        torch.from_numpy(allocator.allocate(nbytes, own=own))
        if nbytes
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    capsule = to_dlpack(base)
    described = _dl(capsule)
    described.device.type, described.device.id = _DL_EXT, 0
    described.dtype.code, described.dtype.bits = _dl_dtype(dtype)
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)  # torch copies both when it takes the capsule
    steps = (ctypes.c_int64 * max(1, len(shape)))(*stride)
    described.ndim, described.shape, described.strides = len(shape), sizes, steps
    return _from_dlpack(capsule)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a tensor of the device."""
    if tensor.is_conj():  # a lazy flag, which DLPack does not know
        return host_view(aten._conj.default.redispatch(CPU_KEYS, tensor)).conj()
    if tensor.is_neg():
        return torch._neg_view(host_view(aten._neg_view.default.redispatch(CPU_KEYS, tensor)))
    capsule = to_dlpack(tensor)
    _dl(capsule).device.type = _DL_CPU
    view = _from_dlpack(capsule)
    # Exporting changes the strides of dimensions of size one, which kernels look at to choose a memory format.
    return view if view.stride() == tensor.stride() else view.as_strided(tensor.shape, tensor.stride())


def host_view_at(address: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the device at an address as a CPU tensor; raises if it is not memory of the device."""
    nbytes = span_bytes(shape, stride, dtype)
    empty = torch.empty(0, dtype=dtype, device="cpu")
    if not nbytes:
        return empty.as_strided(shape, stride)
    allocator.check_range(address, nbytes)
    return empty.set_(from_pointer(address, torch.device("cpu"), nbytes), 0, tuple(shape), tuple(stride))  # pyright: ignore


def tensor_at(address: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the device at an address as a tensor of the device, which does not own it."""
    nbytes = span_bytes(shape, stride, dtype)
    empty = allocate((0,), (1,), dtype)
    if not nbytes:
        return empty.as_strided(shape, stride)
    allocator.check_range(address, nbytes)
    return empty.set_(from_pointer(address, torch.device(NAME, 0), nbytes), 0, tuple(shape), tuple(stride))  # pyright: ignore


def is_emulated(value: object) -> bool:
    """Whether a value is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME
