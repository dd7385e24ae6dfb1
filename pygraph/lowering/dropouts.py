"""Dropouts as a mask with eager's random numbers, and a product that Inductor fuses with what is around it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from pygraph.ir.dropout_masks import DROPOUT_MASK

aten = torch.ops.aten

_ALIGNMENT = 16
"""Bytes to which memory has to be aligned for eager to draw as many numbers at once as it can."""

ValueOf = Callable[[fx.Node], Any]
"""The fake tensor that a node is; anything else if it is none."""

Note = Callable[[fx.Node, torch.Tensor, fx.Node], None]
"""Notes in ``meta`` of a new node which tensor it is, and that it stands for an older one."""


def split_dropouts(graph: fx.Graph, value_of: ValueOf, note: Note) -> None:
    """Replace dropouts in a functional graph of ATen operations.

    IR before::

        native_dropout = aten.native_dropout.default(x, 0.1, True)
        result, mask = native_dropout[0], native_dropout[1]

    IR after::

        mask = pygraph.dropout_mask.default([8, 12], [12, 1], torch.float32, device("cuda:0"), 0.1, None)
        kept = aten.mul.Tensor(x, prims.convert_element_type.default(mask, torch.float32))
        result = aten.mul.Tensor(kept, 1.1111111640930176)

    Dropouts of sizes that are symbols, or of tensors with gaps, off alignment or in double precision, stay as they are.

    Args:
        graph: The graph, which is changed.
        value_of: The fake tensor that a node is.
        note: Notes what a new node is.
    """
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default, sort=True):
        if _is_known(node, value_of(node.args[0])):
            _split(graph, node, value_of, note)


def _is_known(node: fx.Node, value: Any) -> bool:
    _, p, train = (*node.args, None)[:3]
    if not isinstance(value, torch.Tensor) or value.device.type != "cuda" or train is False:
        return False
    if not isinstance(p, float) or not 0 < p < 1 or any(user.target is not operator.getitem for user in node.users):
        return False
    layout: tuple[Any, ...] = (*value.shape, *value.stride(), value.storage_offset())  # of symbols, where sizes are
    if not all(isinstance(number, int) for number in layout) or value.numel() == 0:
        return False
    if value.storage_offset() * value.itemsize % _ALIGNMENT:  # eager deals out numbers in smaller groups
        return False
    is_dense = bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))
    return is_dense and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _split(graph: fx.Graph, node: fx.Node, value_of: ValueOf, note: Note) -> None:
    """Replace one dropout."""
    x: Any = node.args[0]
    p: Any = node.args[1]
    like = value_of(x)
    # As eager's kernel has it: the probability to keep, and its inverse, in single precision.
    scale = float(np.float32(1.0) / np.float32(1.0 - p))

    def call(target: Any, *args: Any) -> fx.Node:
        with like.fake_mode:
            value = target(*(value_of(arg) if isinstance(arg, fx.Node) else arg for arg in args))
        made = graph.call_function(target, args)
        note(made, value, node)
        return made

    with graph.inserting_before(node):
        size, stride = list(like.shape), list(like.stride())
        mask = call(DROPOUT_MASK, size, stride, like.dtype, like.device, p, None)
        convert = torch.ops.prims.convert_element_type.default
        wide = x if like.dtype == torch.float32 else call(convert, x, torch.float32)
        kept = call(aten.mul.Tensor, wide, call(convert, mask, torch.float32))
        result = call(aten.mul.Tensor, kept, scale)
        if like.dtype != torch.float32:
            result = call(convert, result, like.dtype)
    for user in list(node.users):
        user.replace_all_uses_with((result, mask)[user.args[1]])  # pyright: ignore
        graph.erase_node(user)
    graph.erase_node(node)
