"""The rules of operations on padded tensors, by operation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.transforms.padding.indices import embedding, index, index_add, index_put, index_select, scatter
from pygraph.transforms.padding.reductions import mean, nll_loss, pointwise_loss, product, reduction
from pygraph.transforms.padding.rows import (
    Rule,
    along,
    by_rows,
    cat,
    layer_norm,
    padded_in,
    permute,
    pointwise,
    slice_,
    sym_numel,
    sym_size,
    transpose,
    unbind,
    unsqueeze,
    view,
)
from pygraph.transforms.padding.values import Builder, NoRuleError, Number, Padded, aten


def new(position: int) -> Rule:
    """A new tensor; ``position`` is the argument that says its shape."""

    def rule(build: Builder, op: Any, *args: Any, **kwargs: Any) -> Any:
        others = (*args[:position], *args[position + 1 :], kwargs)
        if any(isinstance(one, Number) for one in pytree.tree_leaves(others)) or padded_in(args):
            raise NoRuleError("it takes the size as a number")
        return by_rows(build, op, *args, **kwargs)

    return rule


_SHAPED_FIRST, _SHAPED_SECOND = new(0), new(1)

RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.select, aten.squeeze, aten.argmax, aten.argmin, aten.cumsum, aten.cumprod), along(1)),
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten.logsumexp, aten.amax, aten.amin), along(1)),
    **dict.fromkeys((aten.max, aten.min, aten.flip, aten.var, aten.std), along(1)),
    **dict.fromkeys((aten.sort, aten.argsort), along(1, default=-1)),
    aten.topk: along(2, default=-1),
    aten.slice: slice_, aten.split: along(2, default=0), aten.split_with_sizes: along(2, default=0),
    aten.native_layer_norm: layer_norm, aten.cat: cat,
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape, aten.expand), view),
    aten.permute: permute, aten.t: transpose, aten.transpose: transpose, aten.unsqueeze: unsqueeze,
    aten.unbind: unbind, aten.sym_size: sym_size, aten.sym_numel: sym_numel,
    aten.sum: reduction(0), aten.any: reduction(0), aten.all: reduction(1), aten.prod: reduction(1),
    aten.count_nonzero: reduction(0), aten.mean: mean, aten.nll_loss_forward: nll_loss,
    aten.mse_loss: pointwise_loss(2), aten.smooth_l1_loss: pointwise_loss(2), aten.huber_loss: pointwise_loss(2),
    aten.binary_cross_entropy_with_logits: pointwise_loss(4),
    aten.mm: product(0), aten.bmm: product(0), aten.addmm: product(1), aten.baddbmm: product(1),
    aten.index: index, aten._unsafe_index: index, aten.index_select: index_select, aten.gather: index_select,
    aten.embedding: embedding, aten.index_put: index_put, aten._unsafe_index_put: index_put,
    aten.index_add: index_add, aten.index_copy: index_add, aten.scatter: scatter, aten.scatter_add: scatter,
    **dict.fromkeys((aten.zeros, aten.ones, aten.empty, aten.full, aten.arange), _SHAPED_FIRST),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full), _SHAPED_SECOND),
    **dict.fromkeys((aten.clone, aten._to_copy, aten.zeros_like, aten.ones_like, aten.full_like), pointwise),
    **dict.fromkeys((aten.alias, aten.detach, aten.copy, aten.floor_divide), pointwise),
    aten.select_scatter: along(2), aten.slice_scatter: along(2, default=0),
}  # fmt: skip
"""The rules, by operation without overload."""


def rule_of(op: Any) -> Rule | None:
    """The rule of an operation; None if it has none."""
    found = RULES.get(getattr(op, "overloadpacket", None))
    if found is None and torch.Tag.pointwise in getattr(op, "tags", ()):
        found = pointwise
    return None if found is None else functools.partial(_checked, found, op)


_TAKE_SIZES = frozenset({view, _SHAPED_FIRST, _SHAPED_SECOND})


def _checked(rule: Rule, op: Any, build: Builder, args: Any, kwargs: Any) -> Any:
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NoRuleError("it draws as many random numbers as there are elements")
    if kwargs.get("device", build.device) != build.device:
        raise NoRuleError("its result is on another device")
    if rule not in _TAKE_SIZES:
        args, kwargs = pytree.tree_map_only(Number, build.number, (args, kwargs))
    if not any(isinstance(one, (Padded, Number)) for one in pytree.tree_leaves((args, kwargs))):
        raise NoRuleError("it takes the size as a number")
    return rule(build, op, *args, **kwargs)
