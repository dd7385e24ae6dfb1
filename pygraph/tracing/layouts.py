"""Layouts of results that PyTorch describes in Python, as the device gives them.

PyTorch describes many operations on fakes by decompositions. Where an operand is not contiguous, their results may have
the strides of what is computed last, and not those of the kernel's result. What a trace chooses for these strides,
views and copies above all, is then not what eager chooses, or fails on real tensors. A layout depends on the order of
the operands' strides and not on sizes, so the device is asked, once for each order, with two elements a dimension.
"""

# The tables of decompositions are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table, meta_table
from torch.utils import _pytree as pytree

from pygraph.ir.descriptors import TensorSpec, contiguous_strides
from pygraph.ir.dispatch_modes import no_dispatch_modes

aten = torch.ops.aten

_OTHERS = frozenset({
    aten.softplus_backward.default, aten.elu_backward.default, aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default, aten.hardswish.default, aten.hardswish_backward.default,
    aten.leaky_relu_backward.default, aten.mish_backward.default, aten.rrelu_with_noise_backward.default,
    aten._prelu_kernel.default, aten._prelu_kernel_backward.default, aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default, aten.mse_loss.default, aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default, aten.soft_margin_loss.default,
    aten.soft_margin_loss_backward.default, aten.floor_divide.default, aten._softmax.default,
    aten._softmax_backward_data.default, aten._log_softmax.default, aten._log_softmax_backward_data.default,
    aten.native_layer_norm_backward.default,
})  # fmt: skip
"""Operations that work element by element, or along one dimension, without torch's tag for that. None but the last is
told a size, which would not be that of a few elements."""

Order = tuple[int, ...]
"""The dimensions of a dense tensor, from the outermost in memory to the innermost."""


def as_on_device(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """The result of an operation on fakes, with the strides that the device gives.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: Its result as PyTorch describes it.
    """
    if not _is_described_in_python(func):
        return result
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if any(map(_is_symbolic, tensors)) or all(tensor.is_contiguous() for tensor in tensors):
        return result
    if any(tensor.layout is not torch.strided or not tensor.numel() for tensor in tensors):
        return result
    found, structure = pytree.tree_flatten(result)
    orders = _orders_of(func, args, kwargs, tensors, found)
    for index, order in enumerate(orders):
        value = found[index]
        if order is not None and isinstance(value, torch.Tensor) and value.dim() == len(order):
            strides = _strides(value.shape, order)
            if any(a != b for a, b, n in zip(strides, value.stride(), value.shape, strict=True) if n > 1):
                found[index] = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return pytree.tree_unflatten(found, structure)


def _is_symbolic(tensor: torch.Tensor) -> bool:
    """Whether a size or stride is a symbol, of which nothing may be asked: that would be an assumption."""
    return any(isinstance(one, torch.SymInt) for one in (*tensor.shape, *tensor.stride()))


@functools.cache
def _is_described_in_python(func: Any) -> bool:
    """Whether an operation that makes new tensors, and draws no numbers, is described in Python."""
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    arguments = (*func._schema.arguments, *func._schema.returns)
    if any(argument.alias_info is not None for argument in arguments):
        return False
    if torch.Tag.pointwise in func.tags:
        return func in decomposition_table or func in meta_table
    return func in _OTHERS


# ---- the order of the dimensions of results --------------------------------------------------------------------------


def _small(tensor: torch.Tensor) -> TensorSpec:
    """A tensor as far as the layout of results depends on it: with two elements where there are several."""
    spec = TensorSpec.of(tensor)
    shape = tuple(min(size, 2) for size in spec.shape)
    stride = [0] * len(shape)
    step = 1 if _is_dense(spec) else 2  # gaps stay gaps
    for dim in sorted(range(len(shape)), key=lambda dim: (spec.stride[dim], -dim)):
        if spec.stride[dim]:
            stride[dim] = step
            step *= shape[dim]
    return dataclasses.replace(spec, shape=shape, stride=tuple(stride), offset=0)


def _ones(spec: TensorSpec) -> torch.Tensor:
    return torch.ones(spec.span, dtype=spec.dtype, device=spec.device).as_strided(spec.shape, spec.stride)


def _is_dense(spec: TensorSpec) -> bool:
    return spec.span == math.prod(spec.shape)


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

_known: dict[Any, list[Order | None]] = {}
"""The orders of the results of operations on small tensors."""


def _orders_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor], results: Sequence[Any]
) -> Sequence[Order | None]:
    """The orders of the results' dimensions, none where they are not known; None for a result that is as described."""
    if func is aten.native_layer_norm_backward.default:  # it is told how many elements there are
        return [tuple(range(one.dim())) if isinstance(one, torch.Tensor) else None for one in results]
    if any(not (tensor.dtype.is_floating_point or tensor.dtype is torch.bool) for tensor in tensors):
        return []  # an index that is out of range ends the process's use of a GPU
    shapes = {one.shape for one in results if isinstance(one, torch.Tensor)}
    if len(shapes) != 1 or not all(_expands_to(tensor.shape, *shapes) for tensor in tensors):
        return []  # sizes decide where not every element is made of those at its place
    leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
    if any(isinstance(leaf, _SYMBOLS) for leaf in leaves):
        return []  # the hash of one is that of its value, which would be an assumption
    small = [_small(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    key = (func, tree, tuple((type(one), one) for one in small))
    if key not in _known:
        _known[key] = _asked(func, small, tree)
    return _known[key]


def _expands_to(shape: Sequence[int], other: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return len(shape) <= len(other) and all(size in (1, wanted) for size, wanted in pairs)


def _asked(func: Any, small: Sequence[Any], tree: pytree.TreeSpec) -> list[Order | None]:
    """The orders of the results on the device; none if it refuses, or is not there."""
    try:
        with no_dispatch_modes(), torch.no_grad():
            args, kwargs = pytree.tree_unflatten(
                [_ones(one) if isinstance(one, TensorSpec) else one for one in small], tree
            )
            return [_order(one) for one in pytree.tree_leaves(func(*args, **kwargs))]
    except (RuntimeError, AssertionError):  # the latter is what torch without CUDA raises for one of its devices
        return []


def _order(result: Any) -> Order | None:
    if not isinstance(result, torch.Tensor) or not _is_dense(TensorSpec.of(result)):
        return None
    return tuple(sorted(range(result.dim()), key=lambda dim: (-result.stride(dim), dim)))


def _strides(shape: Sequence[int], order: Order) -> list[int]:
    """The strides of a dense tensor whose dimensions lie in memory in this order."""
    strides = dict(zip(order, contiguous_strides(tuple(shape[dim] for dim in order)), strict=True))
    return [strides[dim] for dim in range(len(order))]
