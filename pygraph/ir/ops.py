"""The library's own operations: memory behind a pointer table, and host values that are read at every call.

========================  ==============================================================================
``pygraph::load``         a tensor over the memory that one entry of a table of addresses points to
``pygraph::store``        writes a tensor to the memory that one entry of a table points to
``pygraph::scalar``       a 0-d device tensor of a host number, refreshed at every call or replay
``pygraph::reinterpret``  a view of a tensor, laid out relative to its first element
``pygraph::scratch``      memory of a tensor whose values nobody needs, as a tensor without values yet
``pygraph::cotangent``    the gradient of a result, in the joint trace of a forward and its backward
========================  ==============================================================================

They work on every device, under ``FakeTensorMode``, ``make_fx`` and ``torch.func.functionalize``. A device other
than ``cpu`` and ``cuda`` says how to make a tensor over its memory with `register_memory_view`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from pygraph.errors import ArgumentError, DeviceError, describe

Number: TypeAlias = "int | float | bool | complex"
MemoryView: TypeAlias = "Callable[[int, tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]"

_LIBRARY: Any = torch.library.Library("pygraph", "DEF")
_LIBRARY.define(
    "load(Tensor table, int slot, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor",
)
_LIBRARY.define("store(Tensor table, int slot, Tensor value) -> ()")
_LIBRARY.define("scalar(Scalar value, *, ScalarType dtype, Device device) -> Tensor")
_LIBRARY.define("scratch(Tensor(a) memory, int[] size, int[] stride, int offset, ScalarType dtype) -> Tensor(a)")
_LIBRARY.define("reinterpret(Tensor(a) self, int[] size, int[] stride, int offset) -> Tensor(a)")
_LIBRARY.define("cotangent(Tensor result, int index) -> Tensor")

_MEMORY_VIEWS: dict[str, MemoryView] = {}


def register_memory_view(device_type: str, view: MemoryView) -> None:
    """Say how a tensor over existing memory of a device is made.

    Args:
        device_type: The device, e.g. ``"emu"``; a second registration replaces the first.
        view: Called as ``view(address, size, stride, dtype)``; returns a tensor over that memory that does not own
            it. Sizes and strides are in elements, the address in bytes.
    """
    _MEMORY_VIEWS[device_type] = view


# ---- load ------------------------------------------------------------------------------------------------------


def load(
    table: torch.Tensor,
    slot: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor over the memory at address ``table[slot]``; nothing is copied, nothing is owned.

    Args:
        table: Addresses in bytes, int64 ``[slots]`` on the CPU.
        slot: Which address.
        size: Shape of the tensor.
        stride: Strides in elements, none negative; the first element is at the address.
        dtype: Element type.
        device: The device whose memory it is.

    Raises:
        ArgumentError: if the table is not a 1-d int64 CPU tensor, or the address is 0 and there are elements.
        DeviceError: if nothing is registered for the device.

    >>> x = torch.arange(6.0)
    >>> load(torch.tensor([x.data_ptr()]), 0, (2, 3), (3, 1), torch.float32, torch.device("cpu"))
    tensor([[0., 1., 2.],
            [3., 4., 5.]])
    """
    return torch.ops.pygraph.load.default(table, slot, list(size), list(stride), dtype, device)


def _load(
    table: torch.Tensor, slot: int, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    address = _address(table, slot)
    if 0 in size:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    return _memory(address, tuple(size), tuple(stride), dtype, device)


def _load_fake(
    table: torch.Tensor, slot: int, size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _address(table: torch.Tensor, slot: int) -> int:
    if table.dtype is not torch.int64 or table.dim() != 1 or table.device.type != "cpu":
        got = f"{table.dtype} with {table.dim()} dimensions on {table.device}"
        raise ArgumentError(describe("pygraph.ops", f"the pointer table is {got}", expected="a 1-d int64 CPU tensor"))
    return int(table[slot])


def _memory(
    address: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    device = torch.device(device)
    if address == 0:
        remedy = "Fill the pointer table before the call."
        raise ArgumentError(describe("pygraph.ops", f"a slot of shape {size} has address 0", remedy=remedy))
    view = _MEMORY_VIEWS.get(device.type)
    if view is not None:
        return view(address, size, stride, dtype)
    if device.type not in ("cpu", "cuda"):
        remedy = f"Call pygraph.ops.register_memory_view({device.type!r}, ...)."
        raise DeviceError(describe("pygraph.ops", f"no way to reach memory of device '{device}'", remedy=remedy))
    span = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    nbytes = span * dtype.itemsize
    raw = _host_bytes(address, nbytes) if device.type == "cpu" else _cuda_bytes(address, nbytes, device)
    return raw.view(dtype).as_strided(size, stride)


def _host_bytes(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _cuda_bytes(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_CudaBytes(address, nbytes), device=device)


class _CudaBytes:
    """Device memory as the CUDA array interface describes it: bytes, so that every dtype can be viewed in it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


# ---- store -----------------------------------------------------------------------------------------------------


def store(table: torch.Tensor, slot: int, value: torch.Tensor) -> None:
    """Write ``value`` to the memory at address ``table[slot]``, laid out as ``value`` is.

    What is written is the memory from the first to the last element that ``value``'s strides reach (its span), so
    a transposed tensor stays transposed and an expanded one (stride 0) stays one element. The operation is an
    effect: it is never removed as dead code.

    Args:
        table: Addresses in bytes, int64 ``[slots]`` on the CPU.
        slot: Which address; there must be room for the span.
        value: What is written, of any shape, on the device whose memory the address is in.

    Raises:
        ArgumentError: if the table is not a 1-d int64 CPU tensor, or the address is 0 and there are elements.
        DeviceError: if nothing is registered for the device.

    >>> x = torch.zeros(6)
    >>> store(torch.tensor([x.data_ptr()]), 0, torch.arange(6.0).view(2, 3).t())
    >>> x
    tensor([0., 1., 2., 3., 4., 5.])
    """
    torch.ops.pygraph.store.default(table, slot, value)


def _store(table: torch.Tensor, slot: int, value: torch.Tensor) -> None:
    address = _address(table, slot)
    if value.numel() == 0:
        return
    value = value.detach().resolve_conj().resolve_neg()
    span = 1 + sum((length - 1) * step for length, step in zip(value.shape, value.stride(), strict=True))
    flat = value.as_strided((span,), (1,), value.storage_offset())
    _memory(address, (span,), (1,), value.dtype, value.device).copy_(flat)


def _store_fake(table: torch.Tensor, slot: int, value: torch.Tensor) -> None:
    return None


# ---- scalar ----------------------------------------------------------------------------------------------------


def scalar(value: Number, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 0-d tensor that holds ``value``, converted as ``Tensor.to`` converts: too large becomes inf, or wraps.

    In a Program, only this operation takes a host number to the device; a replay refreshes it.

    Args:
        value: The number; symbolic while tracing, where nothing is learnt of its value.
        dtype: Element type of the result.
        device: Where the result is.

    >>> scalar(0.1, dtype=torch.bfloat16, device=torch.device("cpu"))
    tensor(0.1001, dtype=torch.bfloat16)
    >>> scalar(-1, dtype=torch.uint8, device=torch.device("cpu"))
    tensor(255, dtype=torch.uint8)
    """
    return torch.ops.pygraph.scalar.default(value, dtype=dtype, device=device)


def _scalar(value: Number, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.full((), value, dtype=dtype, device=device)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
    return torch.full((), _converted(value, dtype), dtype=dtype, device=device)


def _converted(value: Number, dtype: torch.dtype) -> Number:
    if dtype.is_floating_point and isinstance(value, float):
        return math.copysign(math.inf, value)
    return torch.tensor(value, device="cpu").to(dtype).item()


def _scalar_fake(value: Number, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=dtype, device=device)


def reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """A view of ``tensor``'s memory, like ``as_strided``, but wherever the tensor is in its storage.

    Args:
        tensor: Any tensor.
        size: Shape of the view.
        stride: Its strides in elements.
        offset: Elements from the first one of ``tensor`` to that of the view.

    >>> reinterpret(torch.arange(6.0)[1:], (2, 2), (2, 1), 1)
    tensor([[2., 3.],
            [4., 5.]])
    """
    return torch.ops.pygraph.reinterpret.default(tensor, list(size), list(stride), offset)


def _reinterpret(tensor: torch.Tensor, size: list[int], stride: list[int], offset: int) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def scratch(
    memory: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor without values yet in the memory of another, whose values are lost when it is written to.

    Args:
        memory: A tensor whose values nobody needs, with room for the result.
        size: Shape of the result.
        stride: Its strides in elements.
        offset: Bytes from the first element of ``memory`` to that of the result.
        dtype: Its element type.

    Raises:
        ArgumentError: if elements of ``dtype`` cannot lie there, as they begin at multiples of their size.

    >>> x = torch.ones(4)
    >>> _ = scratch(x, (2,), (1,), 4, torch.int32).fill_(0)
    >>> x
    tensor([1., 0., 0., 1.])
    """
    return torch.ops.pygraph.scratch.default(memory, list(size), list(stride), offset, dtype)


def _scratch(memory: torch.Tensor, size: list[int], stride: list[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
    start = memory.storage_offset() * memory.element_size() + offset
    if start % dtype.itemsize:
        raise ArgumentError(
            describe(
                "pygraph.ops", f"no {dtype} can begin at byte {start} of a storage",
                expected=f"a multiple of {dtype.itemsize}",
            )
        )  # fmt: skip
    result = torch.empty(0, dtype=dtype, device=memory.device)
    return result.set_(memory.untyped_storage(), start // dtype.itemsize, size, stride)  # pyright: ignore


def _scratch_fake(
    memory: torch.Tensor, size: list[int], stride: list[int], offset: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=memory.device)


def cotangent(result: torch.Tensor, index: int) -> torch.Tensor:
    """A placeholder for the gradient of ``result`` while a joint graph is traced; no Program that runs has one.

    Args:
        result: A result of a function.
        index: Which one, among those that have a gradient.

    >>> cotangent(torch.ones(2), 0).shape
    torch.Size([2])
    """
    return torch.ops.pygraph.cotangent.default(result, index)


def _cotangent(result: torch.Tensor, index: int) -> torch.Tensor:
    return torch.empty_like(result)


def define(schema: str, real: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> None:
    """Define an operation ``pygraph::…`` that runs ``real`` on every device, and ``fake`` on fake tensors."""
    name = _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pygraph::{name}", fake, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]


def _register() -> None:
    register_fake: Any = torch.library.register_fake  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    for name, real, fake in (
        ("load", _load, _load_fake),
        ("store", _store, _store_fake),
        ("scalar", _scalar, _scalar_fake),
        ("reinterpret", _reinterpret, _reinterpret),
        ("scratch", _scratch, _scratch_fake),
        ("cotangent", _cotangent, _cotangent),
    ):
        _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
        register_fake(f"pygraph::{name}", fake, lib=_LIBRARY)
    fx.has_side_effect(torch.ops.pygraph.store.default)


_register()
