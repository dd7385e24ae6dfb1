"""Writes for which eager raises an error, while fake tensors and functional operations would perform them.

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
from pygraph.ir.functional_variants import may_overlap, written_values

aten = torch.ops.aten


def check_write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Size]]:
    """Refuse an in-place operation, or one with ``out=``, that eager raises an error for.

    Returns:
        What is given as ``out=`` and has memory, with its size, for `check_sizes` afterwards.

    Raises:
        TraceError: What is written overlaps itself or what is read, or cannot hold the result.
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or not func._schema.is_mutable:
        return []
    if _has_out(func) and any(_is_written(argument) and not _is_out(argument) for argument in func._schema.arguments):
        # Functionalization gives each the other's results: they come in another order than what is written.
        raise TraceError("it writes to arguments besides those given as out=")
    written = written_values(func, args, kwargs)
    read = _read_values(func, args, kwargs)
    targets = [value for value in pytree.tree_leaves(written) if isinstance(value, torch.Tensor)]
    if any(_is_symbolic(value) for value in pytree.tree_leaves((written, read)) if isinstance(value, torch.Tensor)):
        return []
    # Eager allows it to fill_() and index_put_(), but functional operations take the elements for separate ones.
    if any(_overlaps_itself(target) for target in targets):
        raise TraceError("it writes to a tensor whose elements share memory")
    for several in written:
        if not isinstance(several, (list, tuple)):
            continue
        # Eager takes the entries in turn, each with what the ones before have written.
        if _share_memory(several):
            raise TraceError("it writes to several tensors at once that share memory")
        if any(_crosses(several, source) for source in read):
            raise TraceError("it writes to tensors one after the other that it also reads, for others")
    in_turn = torch.Tag.pointwise in func.tags or func in _IN_TURN or func._schema.name.startswith("aten::_foreach_")
    for target, source in _pairs(written, read):
        # Eager raises an error where it is sure, and else reads what it has written already.
        if may_overlap(target, source) and not (in_turn and _is_same_memory(target, source)):
            raise TraceError("it writes to memory that it also reads, at another offset")
    outs = _has_out(func)
    _check_types(func, args, kwargs, targets, read, exactly=outs)
    return [(target, target.shape) for target in targets if target.untyped_storage().nbytes()] if outs else []


class Reshaped:
    """Tensors from outside whose shape operations change, as `t_()` or a larger ``out=`` do: that of their fakes."""

    def __init__(self) -> None:
        self._pairs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def note(self, func: Any, given: Any, taken: Any) -> None:
        """Note the tensors that an operation has given another shape.

        Args:
            func: The operation.
            given: Its arguments.
            taken: The same with fakes for tensors from outside.
        """
        is_operation = isinstance(func, torch._ops.OpOverload)
        if not is_operation or not (func._schema.is_mutable or torch.Tag.inplace_view in func.tags):
            return
        for tensor, fake in zip(pytree.tree_leaves(given), pytree.tree_leaves(taken), strict=True):
            is_from_outside = isinstance(tensor, torch.Tensor) and tensor is not fake
            if is_from_outside and _is_of_another_shape(tensor, fake):
                self._pairs.setdefault(id(tensor), []).append((tensor, fake))

    def problem(self, tensor: torch.Tensor | None = None) -> str | None:
        """Why a replay would not do the same, if a tensor, or any, has another shape now than before the call."""
        pairs = self._pairs.values() if tensor is None else [self._pairs.get(id(tensor), ())]
        if any(_is_of_another_shape(*pair) for some in pairs for pair in some):
            return "it changes the shape or strides of a tensor that was there before the call"
        return None


def _is_of_another_shape(tensor: torch.Tensor, fake: torch.Tensor) -> bool:
    return tensor.shape != fake.shape or tensor.stride() != fake.stride()


def check_sizes(outs: Sequence[tuple[torch.Tensor, torch.Size]]) -> None:
    """Refuse an ``out=`` that had another size: eager warns, and resizes it where it lies.

    Raises:
        TraceError: It has been resized.
    """
    if any(out.shape != before for out, before in outs):
        raise TraceError("it resizes what is given as out=")


# Each element depends on the same element of what is read.
_IN_TURN = (aten.copy_.default,)


def _has_out(func: torch._ops.OpOverload) -> bool:
    return any(_is_out(argument) for argument in func._schema.arguments)


def _is_out(argument: Any) -> bool:
    return argument.kwarg_only and _is_written(argument)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _read_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that the operation does not write, one entry each."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if _is_written(argument):
            continue
        if position < len(args) and not argument.kwarg_only:
            found.append(args[position])
        elif argument.name in kwargs:
            found.append(kwargs[argument.name])
    return found


def _pairs(written: Sequence[Any], read: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pairs of a written tensor and one that is read meanwhile; of two lists, as of ``_foreach_add_``, by entry."""
    pairs: list[tuple[Any, Any]] = []
    for target in written:
        for source in read:
            if isinstance(target, (list, tuple)) and isinstance(source, (list, tuple)):
                pairs += zip(target, source, strict=False)
            else:
                pairs += itertools.product(pytree.tree_leaves(target), pytree.tree_leaves(source))
    return [pair for pair in pairs if all(isinstance(value, torch.Tensor) for value in pair)]


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return not all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether ATen says that elements share memory for sure: they are expanded."""
    expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return expanded and tensor.numel() > 0


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same addresses, element by element."""
    layouts = [(t.storage_offset() * t.element_size(), t.element_size(), t.shape, t.stride()) for t in (one, other)]
    return layouts[0] == layouts[1]


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two tensors of a list meet, or may meet."""
    groups = _by_storage(tensors).values()
    return any(may_overlap(a, b) for group in groups for (_, a), (_, b) in itertools.combinations(group, 2))


def _crosses(written: Sequence[torch.Tensor], read: Any) -> bool:
    """Whether a list's entry is read for another one, which eager may do before or after it is written."""
    entries: list[Any] = list(read) if isinstance(read, (list, tuple)) else [read] * len(written)
    groups = _by_storage(written)
    return any(
        index != other and may_overlap(tensor, entry)
        for other, entry in enumerate(entries)
        if isinstance(entry, torch.Tensor)
        for index, tensor in groups.get(entry.untyped_storage()._cdata, ())
    )


def _by_storage(tensors: Sequence[torch.Tensor]) -> dict[int, list[tuple[int, torch.Tensor]]]:
    """The tensors of a list with their indices, by storage."""
    groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.untyped_storage()._cdata, []).append((index, tensor))
    return groups


def _check_types(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor], read: Any, exactly: bool
) -> None:
    """Refuse a result that cannot be cast to what is written, as a complex one to a float."""
    lowest = min((_category(target.dtype) for target in targets), default=3)
    highest = max((_category_of(value) for value in pytree.tree_leaves(read)), default=0)
    if not exactly and highest <= lowest and lowest >= 2:  # what becomes of integers may be a float
        return
    functional = _functional(func)
    if functional is None:
        return
    outs = {argument.name for argument in func._schema.arguments if _is_out(argument)}
    keywords = {name: value for name, value in kwargs.items() if name not in outs}
    try:
        with proxy_tensor.disable_proxy_modes_tracing():
            results = pytree.tree_leaves(functional(*args, **keywords))
    except (RuntimeError, TypeError, ValueError):  # the operation itself will say what is wrong
        return
    for target, result in zip(targets, results, strict=False):
        # Whether a result of another type may go to out= is up to each operation.
        fits = result.dtype == target.dtype if exactly else torch.can_cast(result.dtype, target.dtype)
        if not fits:
            raise TraceError(f"its result is {result.dtype}, which cannot be cast to the {target.dtype} written to")


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
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments if not _is_out(argument)]
