"""Rules of operations whose results are padded where their operands are, and of views of padded tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.ir.descriptors import TensorSpec
from pygraph.transforms.padding.values import Builder, NoRuleError, Number, Padded, Size, aten, evaluated

Rule: TypeAlias = "Callable[..., Any]"
"""Takes a builder, an operation and its arguments, among them padded tensors, and returns the result's equivalent.

Raises `NoRuleError` where the operation needs a tensor without padding.
"""


def plain(args: Any) -> Any:
    """Arguments with the memory of padded tensors for these."""
    return pytree.tree_map_only(Padded, lambda padded: padded.node, args)


def padded_in(args: Any) -> list[Padded]:
    """The padded tensors among arguments."""
    return [one for one in pytree.tree_leaves(args) if isinstance(one, Padded)]


def spec_of(value: Any) -> TensorSpec | None:
    """The spec of an argument that is a tensor; None for others, and where only a run knows its shape."""
    spec = value.spec if isinstance(value, Padded) else value.meta.get("spec") if isinstance(value, fx.Node) else None
    return spec if isinstance(spec, TensorSpec) else None


def is_mask(value: Any) -> bool:
    """Whether an index chooses elements by whether it is true."""
    spec = spec_of(value)
    return spec is not None and spec.dtype in (torch.bool, torch.uint8)


def check_same_dim(args: Any) -> None:
    """Raise NoRuleError unless tensors are padded in one dimension, from behind, along which no other is larger."""
    behind = {padded.behind for padded in padded_in(args)}
    if len(behind) != 1:
        raise NoRuleError("it takes tensors that are padded in different dimensions")
    for leaf in pytree.tree_leaves(args):
        spec = None if isinstance(leaf, Padded) else spec_of(leaf)
        if spec is not None and len(spec.shape) > min(behind) and spec.shape[-1 - min(behind)] != 1:
            raise NoRuleError("it takes another tensor of the same size, of which that is not known")


def size_of(args: Any) -> Size:
    """The one size of padded tensors and numbers among arguments."""
    sizes = {one.size for one in pytree.tree_leaves(args) if isinstance(one, (Padded, Number))}
    if len(sizes) != 1:
        raise NoRuleError("it takes tensors that are padded to different sizes")
    return sizes.pop()


def by_rows(build: Builder, op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation that computes each entry of the padded dimension from that entry of its operands alone.

    The padded dimension of a result is the one that is larger by one where that of the operands is.
    """
    size = size_of((args, kwargs))
    dims = {padded.node: padded.dim for padded in padded_in((args, kwargs))}
    node = build.call(op, *plain(args), **plain(kwargs))
    more_args, more_kwargs = pytree.tree_map_only(
        Number, lambda number: number.of_bound(1), (plain(args), plain(kwargs))
    )
    specs: Any = node.meta["spec"]
    others: Any = evaluated(op, more_args, more_kwargs, dims.get)
    if isinstance(specs, TensorSpec):
        return Padded(node, _dim_that_grows(specs, others, size), size)
    return tuple(
        Padded(build.item(node, index), _dim_that_grows(spec, other, size), size)
        for index, (spec, other) in enumerate(zip(specs, others, strict=True))
    )


def _dim_that_grows(spec: TensorSpec, other: Any, size: Size) -> int:
    pairs = list(zip(spec.shape, other.shape, strict=True))
    found = [dim for dim, (now, then) in enumerate(pairs) if now != then]
    if len(found) != 1 or pairs[found[0]] != (size.bound, size.bound + 1):
        raise NoRuleError("it mixes what is padding with what is not")
    return found[0]


def pointwise(build: Builder, op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation on each element, of tensors that are padded in the same dimension, from behind, and of others."""
    check_same_dim((args, kwargs))
    if op.overloadpacket in _DIVISIONS and isinstance(args[1], Padded):
        args = (args[0], Padded(build.filled(args[1], 1), args[1].dim, args[1].size), *args[2:])
    return by_rows(build, op, *args, **kwargs)


_DIVISIONS = (aten.div, aten.floor_divide, aten.remainder, aten.fmod)  # of integers: by 0, the CPU raises


def along(position: int, name: str = "dim", default: Any = None) -> Rule:
    """An operation along dimensions of its first operand, which must not be the padded one.

    Args:
        position: Which argument names them.
        name: The same as a keyword argument.
        default: If it is not given.
    """

    def rule(build: Builder, op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        dims = args[position - 1] if len(args) >= position else kwargs.get(name, default)
        are_numbers = all(isinstance(dim, int) for dim in _listed(dims))
        if not isinstance(x, Padded) or not are_numbers or x.dim in dims_of(x, dims):
            raise NoRuleError("it goes along the padded dimension")
        return by_rows(build, op, x, *args, **kwargs)

    return rule


def dims_of(x: Padded, dims: Any) -> set[int]:
    """Dimensions as an operation names them, a number or several, not negative; none are all."""
    rank = len(x.spec.shape)
    return {dim % rank for dim in _listed(dims)} or set(range(rank))


def _listed(dims: Any) -> list[Any]:
    return [*cast("Sequence[Any]", dims)] if isinstance(dims, Sequence) else [dims]


def layer_norm(build: Builder, op: Any, x: Any, shape: Sequence[int], *args: Any) -> Any:
    """``native_layer_norm`` over dimensions behind the padded one."""
    if not isinstance(x, Padded) or len(shape) > x.behind:
        raise NoRuleError("it goes along the padded dimension")
    return by_rows(build, op, x, shape, *args)


def slice_(build: Builder, op: Any, x: Padded, dim: int = 0, *ends: Any) -> Any:
    """``slice`` of another dimension, or of all entries."""
    start, end, step = (*ends, *(None, None, 1)[len(ends) :])
    if x.dim in dims_of(x, dim) and start in (None, 0) and end in (None, sys.maxsize) and step == 1:
        return x
    return along(1)(build, op, x, dim, *ends)


def cat(build: Builder, op: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """``cat`` along another dimension."""
    if not all(isinstance(one, Padded) and one.dim not in dims_of(one, dim) for one in tensors):
        raise NoRuleError("it goes along the padded dimension")
    return by_rows(build, op, tensors, dim)


def view(build: Builder, op: Any, x: Any, shape: Sequence[Any], *args: Any) -> Any:
    """A view of other dimensions, before and behind the padded one, or a tensor that is expanded to a padded one."""
    found = by_rows(build, op, x, shape, *args)
    if not isinstance(x, Padded):
        return found
    before, after = x.spec.shape[: x.dim], found.spec.shape[: found.dim]
    if torch.Size(before).numel() != torch.Size(after).numel():
        raise NoRuleError("it mixes what is padding with what is not")
    return found


def permute(build: Builder, op: Any, x: Padded, dims: Sequence[int]) -> Any:
    """``permute``."""
    return Padded(build.call(op, x.node, dims), [dim % len(dims) for dim in dims].index(x.dim), x.size)


def transpose(build: Builder, op: Any, x: Padded, *dims: int) -> Any:
    """``t`` and ``transpose``."""
    rank = len(x.spec.shape)
    one, other = (dim % rank for dim in dims or (0, rank - 1))
    dim = other if x.dim == one else one if x.dim == other else x.dim
    return Padded(build.call(op, x.node, *dims), dim, x.size)


def unsqueeze(build: Builder, op: Any, x: Padded, dim: int) -> Any:
    """``unsqueeze``."""
    return Padded(build.call(op, x.node, dim), x.dim + (dim % (len(x.spec.shape) + 1) <= x.dim), x.size)


def unbind(build: Builder, op: Any, x: Padded, dim: int = 0) -> Any:
    """``unbind`` along another dimension."""
    if x.dim in dims_of(x, dim):
        raise NoRuleError("it goes along the padded dimension")
    return by_rows(build, op, x, dim)


def sym_numel(build: Builder, op: Any, x: Padded) -> Any:
    """The number of elements."""
    del build, op
    return Number(x.size, torch.Size(x.spec.shape).numel() // x.size.bound)


def sym_size(build: Builder, op: Any, x: Padded, dim: int) -> Any:
    """A size of a padded tensor."""
    del build, op
    return Number(x.size) if dim % len(x.spec.shape) == x.dim else x.spec.shape[dim]
