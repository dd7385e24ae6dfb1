"""Constants on the host: folding of the operations that compute them, and which of them the device can compute."""

# torch has no public names for operator overloads. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import Captured, Input, Mutation
from pygraph.ir.effects import has_effect
from pygraph.ir.program import Program
from pygraph.transforms.host_values.transfers import is_device_operation, is_host_tensor, on_device

_FACTORIES = frozenset({"arange", "eye", "full", "ones", "scalar_tensor", "tril_indices", "triu_indices", "zeros"})
_EXACT = frozenset(
    {
        "_to_copy", "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "cat", "clone", "eq", "expand", "flip",
        "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "mul", "ne", "neg", "permute", "reshape",
        "select", "slice", "squeeze", "stack", "sub", "t", "transpose", "tril", "triu", "unsqueeze", "_unsafe_view",
        "view", "where",
    }
)  # fmt: skip
"""Operations whose results on the device have the same bits as on the host, as those of `_FACTORIES` do."""


def host_constants(
    graph: fx.Graph, program: Program, arithmetic: Container[fx.Node] = ()
) -> dict[fx.Node, torch.Tensor]:
    """Host tensors that are the same at every call, with their values.

    Only ``constant`` captures count: parameters, buffers and closed-over tensors can change between calls.

    Args:
        graph: A copy of the Program's graph.
        program: The Program.
        arithmetic: Operations of the host that the device does instead, so that it needs their operands.
    """
    written = {output.input for output in program.outputs if isinstance(output, Mutation)}
    values: dict[fx.Node, torch.Tensor] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for index, (node, descriptor) in enumerate(zip(placeholders, program.inputs, strict=True)):
        if not isinstance(descriptor, Captured) or descriptor.kind != "constant" or index in written:
            continue
        if is_host_tensor(node):
            values[node] = descriptor.value.detach()
    needed = _needed_constants(graph, set(values), arithmetic)
    with torch.no_grad():
        for node in graph.nodes:
            if node in needed:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda source: values[source])
                values[node] = node.target(*args, **kwargs)
    return values


def _needed_constants(graph: fx.Graph, known: set[fx.Node], arithmetic: Container[fx.Node]) -> set[fx.Node]:
    """The nodes that compute constants which device operations use."""
    constant = set(known)
    for node in graph.nodes:
        target: Any = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or has_effect(node):
            continue
        known_operation = target.namespace in ("aten", "prims") and "empty" not in _operation_name(node)
        if known_operation and is_host_tensor(node) and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in constant or node in known:
            continue
        for user in node.users:
            if user in needed or user in arithmetic or on_device(user) or is_device_operation(user):
                needed.add(node)
    return needed


def is_exact(node: fx.Node) -> bool:
    """Whether a constant is computed by nothing but operations that give the same bits on every device."""
    if node.op != "call_function":
        return False
    if is_factory(node):
        return _operation_name(node) != "arange" or not node.meta["spec"].dtype.is_floating_point
    if _operation_name(node) not in _EXACT or "alpha" in node.kwargs:
        return False
    return all(is_exact(source) for source in node.all_input_nodes)


def is_factory(node: fx.Node) -> bool:
    """Whether a node makes a tensor with known elements from none."""
    return _operation_name(node) in _FACTORIES


def _operation_name(node: fx.Node) -> str:
    return getattr(node.target, "_opname", "")


def constant_name(node: fx.Node, inputs: list[Input]) -> str:
    """The origin of a constant: its name as a captured tensor, or the operation that makes it and its line."""
    placeholders = [other for other in node.graph.nodes if other.op == "placeholder"]
    if node in placeholders:
        descriptor = inputs[placeholders.index(node)]
        return descriptor.name if isinstance(descriptor, Captured) else node.name
    if len(node.all_input_nodes) == 1:
        return constant_name(node.all_input_nodes[0], inputs)
    return f"{node.target} at {node.meta.get('source')}"
