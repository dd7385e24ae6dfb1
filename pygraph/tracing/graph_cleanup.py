"""Clean-up of a functional graph: dead and empty operations go, fake values become specs."""

# The tracer works on torch's private parts (storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.ir.descriptors import Spec, TensorSpec, contiguous_strides
from pygraph.ir.effects import BACKWARDS_OF_BATCH_NORM, has_effect, is_first_gradient, is_view, unread_statistics
from pygraph.ir.scopes import came_from

aten = torch.ops.aten


def clean_up_graph(graph: fx.Graph, specs: list[Spec]) -> None:
    """Drop dead and empty operations and arguments that are not read, and turn fake values into specs.

    Args:
        graph: A functional graph, which is changed.
        specs: The specs of its placeholders.
    """
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "namespace", None) == "profiler":
            graph.erase_node(node)  # a label for the profiler, as of torch.optim around its step; it computes nothing
    _drop_aliases(graph)
    _drop_unread_statistics(graph)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    position = 0
    zeros: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.pop("val", None)
        spec = spec_of(value)
        if node.target is aten.copy.default and isinstance(spec, TensorSpec):
            # The result is fresh; a fake one has the first argument's offset until torch's cache of fakes knows it.
            spec = dataclasses.replace(spec, offset=0)
        first = {"first_gradient": True} if is_first_gradient(node) else {}
        node.meta = {"spec": spec, **came_from(node), **first}
        _fold_zeros(node, zeros)
        if node.op == "placeholder":
            node.meta["spec"] = specs[position]
            position += 1
    assert position == len(specs)


def _drop_aliases(graph: fx.Graph) -> None:
    """Have nodes take tensors instead of their aliases; each is changed once, as one may take thousands."""
    originals: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if not originals.keys().isdisjoint(node.all_input_nodes):
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda node: originals.get(node, node))
        if node.target in (aten.lift_fresh.default, aten.detach.default, aten.alias.default):
            originals[node] = node.args[0]
    for node in reversed(originals):
        graph.erase_node(node)


def _drop_unread_statistics(graph: fx.Graph) -> None:
    """Let the backward of batch norm take no running statistics that it does not read: a forward would save copies.

    By their dtype it chooses its kernel, but only where there is no weight.
    """
    for operation in BACKWARDS_OF_BATCH_NORM:
        for node in graph.find_nodes(op="call_function", target=operation.default):
            weight, unread = node.args[2], unread_statistics(node)
            if weight is not None:
                node.args = tuple(None if index in unread else one for index, one in enumerate(node.args))


def drop_fake_values(module: fx.GraphModule) -> None:
    """Delete fake tensors from the metadata of nodes: those of branches of control flow, and those that were erased."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            # An erased node is still in the namespace. Private; checked with torch 2.13.
            for node in (*part.graph.nodes, *part.graph._graph_namespace._obj_to_name):
                if isinstance(node, fx.Node):
                    # "val", and for custom operations "eager_input_vals"; other versions may have others.
                    node.meta = {key: value for key, value in node.meta.items() if not _holds_fakes(value)}


def _holds_fakes(value: Any) -> bool:
    if isinstance(value, (str, int, type(None))):
        return False
    return any(isinstance(leaf, (FakeTensor, torch.SymInt, torch.SymFloat)) for leaf in pytree.tree_leaves(value))


def _fold_zeros(node: fx.Node, zeros: set[fx.Node]) -> None:
    """Replace a zero tangent, which has no memory in eager, by ordinary zeros, and its products and quotients too.

    Zero times infinity is zero for such tangents.

    Args:
        node: A node of the graph.
        zeros: The zero tangents before it; gets the node if it is one.
    """
    spec = node.meta["spec"]
    multiplied = node.target is aten.mul.Tensor and any(arg in zeros for arg in node.args)
    divided = node.target is aten.div.Tensor and node.args[0] in zeros
    if node.target is aten._efficientzerotensor.default:
        node.target = aten.zeros.default
    elif (multiplied or divided) and isinstance(spec, TensorSpec) and spec.stride == contiguous_strides(spec.shape):
        node.target, node.args = aten.zeros.default, (list(spec.shape),)
        node.kwargs = {"dtype": spec.dtype, "device": spec.device}
    elif not (is_view(node) and node.args[0] in zeros):
        return
    zeros.add(node)


def spec_of(value: Any) -> Spec:
    """The spec of a fake value: None if its layout depends on data, or if it is neither a tensor nor a number."""
    if isinstance(value, torch.Tensor):
        layout: tuple[Any, ...] = (*value.shape, *value.stride())
        known = all(isinstance(n, int) or n.node.is_constant() for n in layout)
        if not known or not isinstance(value.storage_offset(), int):
            return None
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(spec_of(item) for item in value)
    for symbolic, kind in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
        if isinstance(value, symbolic):
            return kind
    if isinstance(value, (bool, int, float)):
        return type(value)
    return None
