"""Writes that eager raises for, and that fake tensors and functional operations would perform.

The rules are those of ATen's TensorIterator (``aten/src/ATen/MemoryOverlap.cpp``, ``TensorIterator.cpp``; torch 2.11
and 2.13). What is refused here runs as it is in eager, whose error the caller gets.
"""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError
from pygraph.twins import may_overlap, written_values

aten = torch.ops.aten


def check_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse an in-place operation, or one with ``out=``, that eager raises an error for.

    Raises:
        TraceError: What is written overlaps itself or what is read, or cannot hold the result.
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or not func._schema.is_mutable:
        return
    written = written_values(func, args, kwargs)
    read = _read_values(func, args, kwargs)
    tensors = [value for value in pytree.tree_leaves((written, read)) if isinstance(value, torch.Tensor)]
    if any(_is_symbolic(tensor) for tensor in tensors):
        return
    for target in pytree.tree_leaves(written):
        # Eager allows it to fill_() and index_put_(), but functional operations take the elements for separate ones.
        if isinstance(target, torch.Tensor) and _overlaps_itself(target):
            raise TraceError("it writes to a tensor whose elements share memory")
    for targets in written:
        if isinstance(targets, (list, tuple)) and _share_memory(targets):
            # Eager takes the entries in turn, each with what the ones before have written.
            raise TraceError("it writes to several tensors at once that share memory")
    for target, source in _pairs(written, read):
        if _overlaps_partly(target, source):
            raise TraceError("it writes to memory that it also reads, at another place")
    _check_types(func, args, kwargs, written, read)


def _read_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Everything else that the operation is given, one entry per argument."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            continue
        if position < len(args) and not argument.kwarg_only:
            found.append(args[position])
        elif argument.name in kwargs:
            found.append(kwargs[argument.name])
    return found


def _pairs(written: Sequence[Any], read: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is written with what is read meanwhile: of two lists, as of ``_foreach_add_``, entry by entry."""
    pairs: list[tuple[Any, Any]] = []
    for target in written:
        for source in read:
            if isinstance(target, (list, tuple)) and isinstance(source, (list, tuple)):
                pairs += zip(target, source, strict=False)
            elif isinstance(target, torch.Tensor):
                pairs += [(target, value) for value in pytree.tree_leaves(source)]
    return [pair for pair in pairs if all(isinstance(value, torch.Tensor) for value in pair)]


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether ATen says that elements share memory for sure: they are expanded."""
    expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return expanded and tensor.numel() > 0


def _overlaps_partly(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether ATen says that two tensors share some memory for sure, but do not lie on each other."""
    if target is source or not target.numel() or not source.numel():
        return False
    if target.untyped_storage()._cdata != source.untyped_storage()._cdata:
        return False
    if not _is_dense(target) or not _is_dense(source):
        return False
    (start, end), (first, last) = _extent(target), _extent(source)
    if (start, end) == (first, last):
        return target.stride() != source.stride()
    return start < last and first < end


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two tensors of a list meet, or may meet."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    return any(may_overlap(a, b) for group in by_storage.values() for a, b in itertools.combinations(group, 2))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + tensor.numel() * tensor.element_size()


def _check_types(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Any], read: Sequence[Any]
) -> None:
    """Refuse a result that cannot be cast to what is written, as a complex one to a float."""
    targets = [value for value in pytree.tree_leaves(written) if isinstance(value, torch.Tensor)]
    lowest = min((_category(target.dtype) for target in targets), default=2)
    highest = max((_category_of(value) for value in pytree.tree_leaves(read)), default=0)
    if highest <= lowest and not (lowest < 2 and func.overloadpacket in _ALWAYS_FLOAT):
        return
    functional = _functional(func)
    if functional is None:
        return
    values, keywords = list(args), dict(kwargs)
    for argument in func._schema.arguments:
        if argument.kwarg_only and argument.alias_info is not None:
            keywords.pop(argument.name, None)
    try:
        with proxy_tensor.disable_proxy_modes_tracing():
            results = pytree.tree_leaves(functional(*values, **keywords))
    except Exception:  # the operation itself will say what is wrong
        return
    for target, result in zip(targets, results, strict=False):
        if isinstance(result, torch.Tensor) and not torch.can_cast(result.dtype, target.dtype):
            raise TraceError(f"its result is {result.dtype}, which cannot be cast to the {target.dtype} written to")


_ALWAYS_FLOAT = (aten.div_, aten.div, aten._foreach_div_)


def _category(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def _category_of(value: Any) -> int:
    match value:
        case torch.Tensor():
            return _category(value.dtype)
        case bool():
            return 0
        case int() | torch.SymInt():
            return 1
        case float() | torch.SymFloat():
            return 2
        case complex():
            return 3
        case _:
            return 0


@functools.cache
def _functional(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operation that returns what ``func`` writes, if it has one of the same arguments."""
    namespace, _, name = func._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    wanted = _signature(func)
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and _signature(candidate) == wanted:
            return candidate
    return None


def _signature(func: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Names and types of the arguments, without ``out=``."""
    return [
        (argument.name, str(argument.type))
        for argument in func._schema.arguments
        if not (argument.kwarg_only and argument.alias_info is not None)
    ]
