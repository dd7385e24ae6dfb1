"""Rules of operations by padded indices: padding is an index in range, or that of an entry that is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from pygraph.transforms.padding.rows import (
    by_rows,
    check_same_dim,
    dims_of,
    is_mask,
    padded_in,
    plain,
    size_of,
    spec_of,
)
from pygraph.transforms.padding.values import Builder, NoRuleError, Padded, aten


def _valid(build: Builder, index: Any) -> Any:
    """Indices that are in range wherever any is: padding is 0."""
    return Padded(build.filled(index, 0), index.dim, index.size) if isinstance(index, Padded) else index


def index(build: Builder, op: Any, x: Any, indices: Sequence[Any]) -> Any:
    """``index`` by padded indices, or of a padded tensor along its other dimensions."""
    if isinstance(x, Padded) and (padded_in(indices) or (len(indices) > x.dim and indices[x.dim] is not None)):
        raise NoRuleError("it takes entries of the padded dimension")
    given = [one for one in indices if one is not None]
    if any(map(is_mask, given)):
        raise NoRuleError("it takes a mask as well")
    if not isinstance(x, Padded):
        check_same_dim(given)
    return by_rows(build, op, x, [_valid(build, one) for one in indices])


def index_select(build: Builder, op: Any, x: Any, dim: int, index: Any) -> Any:
    """``index_select`` and ``gather``: by padded indices, or of a padded tensor along another dimension.

    The indices of ``gather`` have that dimension as well.
    """
    if isinstance(x, Padded) and x.dim in dims_of(x, dim):
        raise NoRuleError("it takes entries of the padded dimension")
    if isinstance(x, Padded) and (index.dim if isinstance(index, Padded) else None) != (
        x.dim if op.overloadpacket is aten.gather else None
    ):
        raise NoRuleError("it takes indices of another size")
    return by_rows(build, op, x, dim, _valid(build, index))


def embedding(build: Builder, op: Any, weight: Any, index: Any, *args: Any) -> Any:
    """``embedding`` of padded indices."""
    if isinstance(weight, Padded):
        raise NoRuleError("its weights are padded")
    return by_rows(build, op, weight, _valid(build, index), *args)


def index_put(build: Builder, op: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """``index_put`` at padded indices, where padding goes to entries that are dropped afterwards."""
    given = [one for one in indices if one is not None]
    if isinstance(x, Padded) or any(map(is_mask, given)):
        raise NoRuleError("what it writes to is padded, or it takes a mask as well")
    check_same_dim(given)
    size_of((indices, values))
    first = next(place for place, one in enumerate(indices) if isinstance(one, Padded))
    longer, extent = _with_surplus(build, x, first)
    indices = [
        _to_surplus(build, one, extent, from_the_end=True) if place == first else _valid(build, one)
        for place, one in enumerate(indices)
    ]
    found = build.call(op, longer, plain(indices), plain(values), accumulate)
    return _without_surplus(build, found, first, extent)


def index_add(build: Builder, op: Any, x: Any, dim: int, index: Any, source: Any, **kwargs: Any) -> Any:
    """``index_add`` and ``index_copy`` at padded indices, where padding goes to entries that are dropped."""
    if isinstance(x, Padded) or not isinstance(index, Padded) or not isinstance(source, Padded):
        raise NoRuleError("what it writes to is padded, or one of its operands is not")
    size_of((index, source))
    dim %= len(_shape(x))
    if source.dim != dim:
        raise NoRuleError("what it adds is padded in another dimension")
    longer, extent = _with_surplus(build, x, dim)
    found = build.call(op, longer, dim, _to_surplus(build, index, extent).node, source.node, **kwargs)
    return _without_surplus(build, found, dim, extent)


def scatter(build: Builder, op: Any, x: Any, dim: int, index: Any, source: Any, **kwargs: Any) -> Any:
    """``scatter`` and ``scatter_add`` at padded indices, where padding goes to entries that are dropped."""
    if isinstance(x, Padded) or not isinstance(index, Padded):
        raise NoRuleError("what it writes to is padded")
    if isinstance(source, Padded) and (source.dim != index.dim or source.size != index.size):
        raise NoRuleError("its operands are padded in different dimensions")
    dim %= len(_shape(x))
    longer, extent = _with_surplus(build, x, dim)
    found = build.call(op, longer, dim, _to_surplus(build, index, extent).node, plain(source), **kwargs)
    return _without_surplus(build, found, dim, extent)


def _with_surplus(build: Builder, x: fx.Node, dim: int) -> tuple[fx.Node, int]:
    """The tensor with one more entry in a dimension, for what is dropped, and its extent without."""
    extent = _shape(x)[dim]
    more = build.call(aten.slice.Tensor, x, dim, 0, 1)
    return build.call(aten.cat.default, [x, more], dim), extent


def _without_surplus(build: Builder, x: fx.Node, dim: int, extent: int) -> fx.Node:
    return build.contiguous(build.call(aten.slice.Tensor, x, dim, 0, extent))


def _to_surplus(build: Builder, index: Padded, extent: int, *, from_the_end: bool = False) -> Padded:
    """Indices of which padding is the entry that is dropped; those that are out of range stay so.

    Args:
        build: What makes nodes.
        index: The indices.
        extent: How many entries there are without the one that is dropped.
        from_the_end: Whether -1 is the last of them.
    """
    found = index.node
    if from_the_end:
        negative = build.call(aten.lt.Scalar, found, 0)
        found = build.call(aten.where.self, negative, build.call(aten.add.Tensor, found, extent), found)
    outside = build.call(
        aten.logical_or.default, build.call(aten.lt.Scalar, found, 0), build.call(aten.ge.Scalar, found, extent)
    )
    found = build.call(aten.masked_fill.Scalar, found, outside, extent + 1)
    return Padded(build.filled(Padded(found, index.dim, index.size), extent), index.dim, index.size)


def _shape(x: fx.Node) -> tuple[int, ...]:
    spec = spec_of(x)
    if spec is None:
        raise NoRuleError("it takes something whose shape only a run knows")
    return spec.shape
