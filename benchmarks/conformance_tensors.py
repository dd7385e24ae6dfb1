"""Tensors of the conformance cases: copies of equal layout, poisoned memory, and comparison with eager's results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

_ALIGNMENT = 256


def same_layout(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the leaves of two samples have the same types, and tensors the same layout."""

    def layout(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return type(leaf)
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.storage_offset())

    return [layout(leaf) for leaf in leaves] == [layout(leaf) for leaf in others]


def clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies at other addresses with the same layout, alignment and sharing of memory."""
    storages: dict[int, torch.Tensor] = {}
    objects: dict[int, torch.Tensor] = {}
    result: list[torch.Tensor] = []
    for tensor in tensors:
        if id(tensor) not in objects:
            objects[id(tensor)] = _clone(tensor, storages)
        result.append(objects[id(tensor)])
    return result


def _clone(tensor: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return tensor.clone()
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        size, shift = storage.nbytes(), storage.data_ptr() % _ALIGNMENT
        memory = torch.empty(size + 2 * _ALIGNMENT, dtype=torch.uint8, device=tensor.device)
        start = (shift - memory.data_ptr()) % _ALIGNMENT
        copy = memory[start : start + size]
        copy.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (size,), (1,)))
        storages[storage._cdata] = copy
    copy = storages[storage._cdata]
    typed = copy[: copy.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    offset = typed.storage_offset() + tensor.storage_offset()
    view = typed.as_strided(tensor.shape, tensor.stride(), offset)
    view = view.conj() if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Fill the memory of tensors with NaN, or with zeros where any other integer could be unsafe as an index."""
    for tensor in tensors:
        if tensor.layout != torch.strided or not tensor.numel() or tensor.is_quantized:
            continue
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            flat.fill_(float("nan"))
        else:
            flat.zero_()


class Mismatch(Exception):
    """A result is not that of eager."""


def compare(
    got: Any, expected: Any, where: str, *, values: bool = True, strides: bool = True, spread: Sequence[str] = ()
) -> bool:
    """Whether two results are equal to the last bit; they must at least be close.

    Args:
        got: The result of pygraph.
        expected: The result of eager.
        where: A name of the results, for the message.
        values: Compare values too, not only types and layouts.
        strides: Compare strides too.
        spread: Per leaf, how much eager differs from itself: ``rounding`` allows for sums in another order (tolerance
            relative to the largest value), ``arbitrary`` for any value.

    Raises:
        Mismatch: Structure, layout, dtype or values differ.
    """
    leaves, structure = pytree.tree_flatten(got)
    wanted, wanted_structure = pytree.tree_flatten(expected)
    if structure != wanted_structure:
        raise Mismatch(f"{where}: structure {structure} instead of {wanted_structure}")
    exact = True
    for index, (a, b) in enumerate(zip(leaves, wanted, strict=True)):
        place = where if len(leaves) == 1 else f"{where} [{index}]"
        kind = spread[index] if spread else "none"
        told = values and kind != "arbitrary"
        if isinstance(b, torch.Tensor):
            exact &= _compare_tensors(a, b, place, told, strides, loose=kind == "rounding")
        elif type(a) is not type(b) or (told and a != b and not (_is_nan(a) and _is_nan(b))):
            raise Mismatch(f"{place}: {a!r} instead of {b!r}")
    return exact


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _compare_tensors(a: Any, b: torch.Tensor, place: str, values: bool, strides: bool, loose: bool) -> bool:
    if not isinstance(a, torch.Tensor):
        raise Mismatch(f"{place}: a {type(a).__name__} instead of a tensor")
    for name in ("shape", "dtype", "device", "layout", "requires_grad"):
        if getattr(a, name) != getattr(b, name):
            raise Mismatch(f"{place}: {name} {getattr(a, name)} instead of {getattr(b, name)}")
    if strides and b.layout == torch.strided and b.numel() and a.stride() != b.stride():
        raise Mismatch(f"{place}: strides {a.stride()} instead of {b.stride()}")
    if not values or not b.numel():
        return True
    tolerance = _TOLERANCES.get(b.dtype, (1.3e-6, 1e-5))
    a, b = (plain(x) for x in (a, b))
    if same_bits(a, b):
        return True
    if not (b.dtype.is_floating_point or b.dtype.is_complex):
        raise Mismatch(f"{place}: {int((a != b).sum())} of {b.numel()} integers differ")
    rtol, atol = tolerance
    wide = torch.complex128 if b.dtype.is_complex else torch.float64
    a, b = a.to(wide), b.to(wide)
    if loose:
        rtol *= 10
        largest = torch.nan_to_num(b.abs(), 0.0, 0.0, 0.0).max()
        atol = max(atol, rtol * float(largest))
    if not torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
        lost = int((a.isnan() & ~b.isnan()).sum())
        gap = torch.nan_to_num((a - b).abs(), 0.0, float("inf"), float("inf")).max()
        extra = f", {lost} NaN where there should be none" if lost else ""
        raise Mismatch(f"{place}: largest difference {float(gap):.3g} of {float(b.abs().max()):.3g}{extra}")
    return False


# The defaults of torch.testing.assert_close.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7), torch.complex64: (1.3e-6, 1e-5), torch.complex128: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
}  # fmt: skip


_NARROW = {torch.complex32: torch.complex64, torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in ordinary memory of the host."""
    tensor = tensor.detach()
    if tensor.dtype in _NARROW:  # the host cannot compare them
        tensor = tensor.to(_NARROW[tensor.dtype])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors on the host are the same to the last bit, any NaN being equal to any other."""
    if torch.equal(a, b):
        return True
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return bool(((a == b) | ((a != a) & (b != b))).all())
    return False


def aliases(result: Any, tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """For each tensor of a result the argument in whose memory it lies."""
    owners: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        if tensor.layout == torch.strided and tensor.numel():
            owners.setdefault(tensor.untyped_storage().data_ptr(), index)
    found: list[int | None] = []
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            strided = leaf.layout == torch.strided and leaf.numel()
            found.append(owners.get(leaf.untyped_storage().data_ptr()) if strided else None)
    return found
