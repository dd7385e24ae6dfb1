"""Symbols in layouts of tensors: those of shapes are needed, and those of offsets are live where they are positions."""

# Symbols are torch's private parts, of which torch says nothing. Checked with torch 2.11 and 2.13.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols
from torch.utils import _pytree as pytree

aten = torch.ops.aten

VIEWS = (aten.select.int, aten.slice.Tensor)
"""Views of a tensor at a position."""

SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)
"""Tensors with other contents of such a view."""

GRADIENTS = (aten.select_backward.default, aten.slice_backward.default)
"""Gradients of tensors, made of those of such a view."""

# Where operations take the position.
_AT: dict[Any, int] = {**dict.fromkeys(VIEWS, 2), **dict.fromkeys((*SCATTERS, *GRADIENTS), 3)}

# Views by absolute strides, or of another element size, whose symbols say more than a position.
_OF_LAYOUT = (aten.as_strided.default, aten.view.dtype, aten.as_strided_scatter.default)


def symbols_of_layouts(nodes: Iterable[fx.Node], results: Sequence[Any]) -> set[Any]:
    """The symbols that shapes and strides are made of, and offsets of which a graph cannot take the value live.

    Args:
        nodes: The nodes of a recording.
        results: The values that the function returns.
    """
    needed: set[Any] = set()
    for node in nodes:
        values = [one for one in pytree.tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]
        for value in values:
            needed |= free_symbols((*value.shape, *value.stride()))
        offsets = _offsets(values)
        before = _offsets([one.meta.get("val") for one in node.all_input_nodes])
        if node.target in _OF_LAYOUT:
            needed |= offsets | before
        elif offsets - before and not _is_position(node):
            needed |= offsets
    return needed | _offsets([value for value in results if isinstance(value, torch.Tensor)])


def bounds_of(node: fx.Node) -> tuple[Any, int | torch.SymInt, int | torch.SymInt] | None:
    """The position of a view, if it is live, and the first and the last one of its sign at which the view lies inside.

    A position depends on data of the host alone, so that calls can check this, and eager's error is raised where it is
    outside.
    """
    position = position_of(node)
    if position is None or node.target not in VIEWS:
        return None
    start: Any = position.meta["val"]
    whole: Any = node.args[0].meta["val"]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    size, length = whole.shape[dim], 1
    if node.target is not aten.select.int:
        if has_failed(node):
            return None
        step: Any = node.args[4] if len(node.args) > 4 else 1
        length = (node.meta["val"].shape[dim] - 1) * step + 1
    return (start.node.expr, 0, size - length) if start.node.hint >= 0 else (start.node.expr, -size, -length)


def is_outside(node: fx.Node) -> bool:
    """Whether a view does not lie inside at the live position that it has in this call, and torch has not said so."""
    bounds, position = None if has_failed(node) else bounds_of(node), position_of(node)
    return bounds is not None and not bounds[1] <= position.meta["val"].node.hint <= bounds[2]


def has_failed(node: fx.Node) -> bool:
    """Whether an operation has raised an error that the function has caught, as of a position that is outside."""
    return node.op == "call_function" and "val" not in node.meta


def position_symbols(node: fx.Node) -> set[Any]:
    """The symbols of a live position."""
    return set(free_symbols(position_of(node).meta["val"]))


def unknown_bounds(nodes: Iterable[fx.Node]) -> set[Any]:
    """The symbols of positions of which no call can check whether they lie inside, as where data decides the size."""
    taking = [node for node in nodes if _AT.get(node.target) is not None]
    positions = [
        _number_at(node)
        for node in taking
        if _has_unknown_sizes(node) or (has_failed(node) and node.target is not aten.select.int)
    ]
    return {symbol for one in positions if one is not None for symbol in free_symbols(one.meta["val"])}


def position_of(node: fx.Node) -> Any:
    """The position of a view, or of a write or a gradient of one, if it is that of a live number; None if not."""
    return None if _AT.get(node.target) is None or _has_unknown_sizes(node) else _number_at(node)


def _number_at(node: fx.Node) -> Any:
    """The position that an operation takes, if it is a number that is not the device's; None if not."""
    at = _AT[node.target]
    position: Any = node.args[at] if len(node.args) > at else None
    value = position.meta.get("val") if isinstance(position, fx.Node) else None
    if not isinstance(value, torch.SymInt) or not free_symbols(value) or free_unbacked_symbols(value):
        return None
    return position


def _has_unknown_sizes(node: fx.Node) -> bool:
    """Whether data decides the layout of what an operation takes or returns."""
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(free_unbacked_symbols((*one.shape, *one.stride())) for one in tensors)


def _offsets(values: Iterable[Any]) -> set[Any]:
    return {
        symbol
        for value in values
        if isinstance(value, torch.Tensor) and isinstance(value.storage_offset(), torch.SymInt)
        for symbol in free_symbols(value.storage_offset())
    }


def _is_position(node: fx.Node) -> bool:
    """Whether a node is a view of a tensor at a position, and no two elements of the tensor share memory."""
    if node.target not in VIEWS or _has_unknown_sizes(node):
        return False
    whole: Any = node.args[0].meta.get("val")  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    return not any(stride == 0 and size > 1 for size, stride in zip(whole.shape, whole.stride(), strict=True))
