"""Arithmetic on 0-d host tensors that the device does instead, so that nothing runs on the host before a graph."""

from __future__ import annotations

from typing import Any

from torch import fx

from pygraph.ir.effects import is_operation
from pygraph.transforms.host_values.transfers import (
    is_device_operation,
    is_host_tensor,
    is_real_scalar,
    is_upload,
    on_device,
)

_EXACT = frozenset(
    {
        "_to_copy", "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "clone", "convert_element_type", "div",
        "eq", "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "maximum", "minimum", "mul", "ne",
        "neg", "reciprocal", "sub", "where",
    }
)  # fmt: skip
"""Operations that hosts and devices round in the same way, or that do not round. Square roots are none of them: that of
2.0 in float64 was another one on an H200 than on the host beside it, with torch 2.11."""

_MOST = 64
"""Operations of a Program: each may be a kernel, for a microsecond of the device."""


def device_arithmetic(graph: fx.Graph) -> frozenset[fx.Node]:
    """Operations on 0-d host tensors whose results only the device uses, and that it computes to the same bits.

    Before::

        def program(x: "float32[4] cuda", k: "float64[] cpu"):
            is_positive = aten.ge.Scalar(k, 0)
            sign = aten.where.self(is_positive, one, minus_one)
            mul = aten.mul.Tensor(x, sign)

    After, with these operations on the device::

        def program(x: "float32[4] cuda", k: "float64[] cpu", element_of_k: "float"):
            scalar = pygraph.scalar(element_of_k, dtype=float64, device="cuda:0")
            is_positive = aten.ge.Scalar(scalar, 0)
            sign = aten.where.self(is_positive, one, minus_one)
            mul = aten.mul.Tensor(x, sign)

    Args:
        graph: A copy of a Program's graph.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_arithmetic(node) and all(map(_is_scalar, node.all_input_nodes)):
            found.add(node)
    for node in reversed(graph.nodes):
        if node in found and not all(_takes_on_device(user, found) for user in node.users):
            found.discard(node)
    return frozenset(found) if len(found) <= _MOST else frozenset()


def _is_scalar(node: fx.Node) -> bool:
    return is_host_tensor(node) and is_real_scalar(node.meta["spec"])


def _is_arithmetic(node: fx.Node) -> bool:
    if not is_operation(node) or not _is_scalar(node) or not node.all_input_nodes:
        return False
    target: Any = node.target
    if target._opname not in _EXACT or "alpha" in node.kwargs or "rounding_mode" in node.kwargs:
        return False
    # By a number, the device divides by multiplying with its reciprocal.
    return target._opname != "div" or all(isinstance(argument, fx.Node) for argument in node.args)


def _takes_on_device(user: fx.Node, found: set[fx.Node]) -> bool:
    return user in found or is_upload(user) or (is_device_operation(user) and on_device(user))
