"""Functional variants of operations that write to their arguments.

``torch.func.functionalize`` knows ATen's in-place operations only. A custom operation whose schema declares what it
writes (``torch.library.custom_op(mutates_args=…)``) gets a functional variant here, which writes to copies and returns
them after its own results; of an argument that may be None, it returns a list. A Program at stage ``aten`` holds the
variant; lowering restores the operation itself, in place where the old contents are needed no more.

======================================================  ========================================================
the operation                                           its variant
======================================================  ========================================================
``lib::fill(Tensor(a!) x, int k) -> ()``                ``pygraph_functional::lib_fill(Tensor x, int k) -> Tensor``
``lib::scale(Tensor x, Tensor(a!) out) -> Tensor``      ``… (Tensor x, Tensor out) -> (Tensor, Tensor)``
``lib::clear(Tensor(a!)?[] xs) -> ()``                  ``… (Tensor?[] xs) -> Tensor[]``
======================================================  ========================================================
"""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError, describe
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.evaluate import clone_strided

_LIBRARY: Any = torch.library.Library("pygraph_functional", "DEF")

_VARIANTS: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {}
_MUTATING: dict[Any, torch._ops.OpOverload] = {}

_WRITES = re.compile(r"\([a-z]\w*!\)")


def needs_functional_variant(target: Any) -> bool:
    """Whether an FX target writes to its arguments in a way that functionalization does not know.

    Example:
        >>> import torch
        >>> needs_functional_variant(torch.ops.aten.add_.Tensor), needs_functional_variant(torch.ops.aten.add.Tensor)
        (False, False)
    """
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return False
    return is_fused_optimizer(target) or not torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), "Functionalize"
    )


def is_fused_optimizer(target: Any) -> bool:
    """Whether an FX target is the one kernel of an optimizer; functionalization refuses its empty lists of tensors."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name in _FUSED_OPTIMIZERS


_FUSED_OPTIMIZERS = frozenset(f"aten::_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd"))


def functional_variant_of(op: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The operation that writes to copies of what ``op`` writes to, and returns them after the results of ``op``.

    Raises:
        TraceError: The operation returns memory of an argument.
    """
    if op in _VARIANTS:
        return _VARIANTS[op]
    schema = op._schema
    name = str(schema.name)
    if any(result.alias_info is not None for result in schema.returns):
        raise TraceError(describe(name, "it writes to an argument and returns its memory", expected="fresh results"))
    before, _, after = str(schema).partition("(")[2].rpartition(" -> ")
    results = [text for text in after.strip("()").split(", ") if text]
    results += [_type_text(argument) for argument in schema.arguments if _is_written(argument)]
    stem = re.sub(r"\W", "_", name.replace("::", "_")) + (f"_{schema.overload_name}" if schema.overload_name else "")
    while hasattr(torch.ops.pygraph_functional, stem):  # an operation that was defined again
        stem += "_"
    returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
    _LIBRARY.define(f"{stem}({_WRITES.sub('', before)} -> {returned}")

    def run(*args: Any, **kwargs: Any) -> Any:
        return _on_copies(op, args, kwargs)

    def described(*args: Any, **kwargs: Any) -> Any:
        return _optimized(op, args, kwargs) if is_fused_optimizer(op) else run(*args, **kwargs)

    _LIBRARY.impl(stem, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pygraph_functional::{stem}", described, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]
    variant = getattr(torch.ops.pygraph_functional, stem).default
    _VARIANTS[op], _MUTATING[variant] = variant, op
    return variant


def mutating_operation_of(target: Any) -> torch._ops.OpOverload | None:
    """The operation of which an FX target is the functional variant; None if it is none."""
    return _MUTATING.get(target)


def written_values(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call of ``op`` writes to: one entry each, a list for one that may be several or None."""
    found: list[Any] = []
    for position, argument in enumerate(op._schema.arguments):
        if _is_written(argument):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found.append(_present(value) if _is_optional(argument) else value)
    return found


def _present(value: Any) -> list[Any]:
    """The values that are not None, of a value or a list of values."""
    return [item for item in pytree.tree_leaves(value) if item is not None]


def check_disjoint_arguments(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that share memory where one of them is written: the variant's copies would not.

    Raises:
        TraceError: Two tensors overlap, or the elements of a written one overlap each other.
    """
    written = list(pytree.tree_leaves(written_values(op, args, kwargs)))
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    neighbours: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
    for value in tensors:  # a fused optimizer gets thousands of them
        neighbours[value.untyped_storage()._cdata].append(value)
    for value in written:
        if TensorSpec.of(value).overlaps_itself:
            raise TraceError(f"{op.name()} writes to a tensor whose elements share memory")
        if sum(may_overlap(value, other) for other in neighbours[value.untyped_storage()._cdata]) > 1:
            raise TraceError(f"{op.name()} writes to an argument that shares memory with another")


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common, or may have."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    try:
        return np.shares_memory(_Bytes(one), _Bytes(other), max_work=_MAX_WORK)  # pyright: ignore
    except (np.exceptions.TooHardError, OverflowError):
        return True


_MAX_WORK = 100_000


class _Bytes:
    """The bytes of a tensor in its storage, for NumPy, which solves where strided memory meets and reads nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        spec = TensorSpec.of(tensor)
        size = spec.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": (*spec.shape, size),
            "strides": (*(stride * size for stride in spec.stride), 1),
            "typestr": "|u1",
            "data": (_ANYWHERE + spec.offset * size, False),
        }


_ANYWHERE = 1 << 40


def call_functionally(
    op: torch._ops.OpOverload,
    call: tuple[Sequence[Any], Mapping[str, Any]],
    targets: tuple[Sequence[Any], Mapping[str, Any]],
) -> Any:
    """Call the functional variant of ``op`` and copy the new contents to what it writes, under functionalization.

    Args:
        op: The operation.
        call: Its arguments and keyword arguments.
        targets: The arguments to update: those of the call, or tensors of which they are copies.
    """
    args, kwargs = call
    returned = functional_variant_of(op)(*args, **kwargs)
    count = len(op._schema.returns)
    written = written_values(op, *targets)
    results = list(returned) if count + len(written) > 1 else [returned]
    for old, new in zip(pytree.tree_leaves(written), pytree.tree_leaves(results[count:]), strict=True):
        old.copy_(new)
    return None if not count else results[0] if count == 1 else tuple(results[:count])


def _on_copies(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = list(args)
    keywords = dict(kwargs)
    copies: list[Any] = []
    for position, argument in enumerate(op._schema.arguments):
        if not _is_written(argument):
            continue
        value = arguments[position] if position < len(arguments) else keywords.get(argument.name)
        copy = pytree.tree_map_only(torch.Tensor, clone_strided, value)
        if position < len(arguments):
            arguments[position] = copy
        else:
            keywords[argument.name] = copy
        copies.append(_present(copy) if _is_optional(argument) else copy)
    out = op(*arguments, **keywords)
    count = len(op._schema.returns)
    results = [] if not count else [out] if count == 1 else list(out)
    results += copies
    return results[0] if len(results) == 1 else tuple(results)


def _optimized(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], ...]:
    """The results of the variant of a fused optimizer, without values: memory like each of hundreds of tensors."""
    return tuple([_like(tensor) for tensor in several] for several in written_values(op, args, kwargs))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_optional(argument: Any) -> bool:
    return "Optional" in str(argument.type)


def _type_text(argument: Any) -> str:
    return "Tensor[]" if "List" in str(argument.type) or _is_optional(argument) else "Tensor"
