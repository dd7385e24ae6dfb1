"""The epilogue of a graph: results that need no device, made after each replay from the inputs of that call.

Three kinds of results of AOTAutograd's graphs are made by a few operations of their own, as eager makes them: views of
inputs that require grad, so that a view is one of the very tensor that the caller passed; tensors on meta, which have
no memory, so that each call returns new ones of its own sizes; and 0-d tensors on the host that are computed from such
inputs, as the sign of a temperature that is saved for a backward.
"""

# AOTAutograd's graphs and torch's symbols are private. Checked with torch 2.13.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from pygraph.ir.effects import has_effect, is_operation, is_view, is_written, root, written_arguments
from pygraph.ir.program import output_values

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class SplitGraph:
    """A graph, and the epilogue that was taken out of it.

    Attributes:
        module: The graph; its results at ``epilogue_results`` are None.
        epilogue: Computes these results, in order, from all inputs of the graph.
        epilogue_results: Positions of these results among all results.
        unread_inputs: Positions of the inputs on meta, which the graph does not read: where it needs such a tensor, it
            makes a new one.
    """

    module: fx.GraphModule
    epilogue: Callable[..., Sequence[Any]]
    epilogue_results: tuple[int, ...]
    unread_inputs: tuple[int, ...]


def split_epilogue(module: fx.GraphModule, inputs: Sequence[Any]) -> SplitGraph | None:
    """Split a graph into the part that is replayed and its epilogue.

    Args:
        module: The graph; its nodes say in ``meta["val"]`` what they are.
        inputs: All inputs of a call.

    Returns:
        Both parts; None if there is no epilogue.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    differentiable = {
        node
        for node, value in zip(placeholders, inputs, strict=True)
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    values = output_values(module.graph)
    on_meta = any(map(_is_meta, module.graph.nodes))
    scalars = _host_scalars(module.graph)
    if not on_meta and not any(isinstance(one, fx.Node) and (is_view(one) or one in scalars) for one in values):
        return None
    computable, created = _without_device(module.graph, scalars)
    results = tuple(
        index
        for index, value in enumerate(values)
        if isinstance(value, fx.Node) and value in computable and value.op != "placeholder"
        and (_is_meta(value) or value in scalars or (is_view(value) and root(value) in differentiable))
    )  # fmt: skip
    updates = [node for node in module.graph.nodes if node in computable and _acts_on_meta(node)]
    removable = {node for node in computable if _is_meta(node)} | set(updates)
    removable |= scalars
    returns_scalars = any(values[index] in scalars for index in results)
    rest = _remove(module, results, removable) if on_meta or returns_scalars else module
    unread = tuple(
        index
        for index, (old, now) in enumerate(zip(placeholders, rest.graph.find_nodes(op="placeholder"), strict=True))
        if _is_meta(old) and not any(map(_is_read_by, now.users))
    )
    if not results and not updates and not unread:
        return None
    epilogue = _extract(module, [values[index] for index in results], updates, created)
    return SplitGraph(rest, epilogue, results, unread)


def _is_meta(node: fx.Node) -> bool:
    """Whether the value of a node consists of tensors on meta alone."""
    value = node.meta.get("val")
    items: Any = value if isinstance(value, (list, tuple)) else (value,)
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def _host_scalars(graph: fx.Graph) -> set[fx.Node]:
    """0-d tensors on the host that are computed from inputs on the host, to which the graph does not write."""
    written = {root(argument) for node in graph.nodes if is_written(node) for argument in written_arguments(node)}
    inputs = {node for node in graph.find_nodes(op="placeholder") if _is_on_host(node)} - written
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not is_operation(node) or not _is_on_host(node) or node in written or is_view(node) or has_effect(node):
            continue
        target: Any = node.target
        is_constant = not node.all_input_nodes and target._schema.name in _CONSTANTS
        follows = node.all_input_nodes and all(one in inputs or one in found for one in node.all_input_nodes)
        if target.namespace in ("aten", "prims") and (is_constant or follows):
            found.add(node)
    return found


_CONSTANTS = ("aten::full", "aten::scalar_tensor", "aten::ones", "aten::zeros")


def _is_on_host(node: fx.Node) -> bool:
    """Whether the value of a node is a 0-d tensor on the host."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() == 0


def _acts_on_meta(node: fx.Node) -> bool:
    """Whether a node is run for its effects on, or checks of, tensors on meta alone."""
    if not is_operation(node):
        return False
    if is_written(node):
        return all(map(_is_meta, written_arguments(node)))
    tensors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    return not node.target._schema.returns and bool(tensors) and all(map(_is_meta, tensors))  # pyright: ignore


def _without_device(graph: fx.Graph, scalars: set[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Nodes that can be computed without a device: tensors on meta, views, and the numbers that these need.

    Args:
        graph: The graph.
        scalars: Its 0-d tensors on the host.

    Returns:
        These nodes, and those among them that the epilogue creates from their layout, whatever computes them here.
    """
    symbols = _symbols(graph)
    replaced = {root(node.args[0]) for node in graph.nodes if _replaces_storage(node)}  # pyright: ignore
    computable: set[fx.Node] = set()
    created: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            computable.add(node)
        elif node.op != "call_function":
            continue
        elif node in scalars:
            computable.add(node)
        elif _is_fresh_meta_tensor(node, symbols):
            computable.add(node)
            created.add(node)
        elif all(one in computable for one in node.all_input_nodes):
            same_view = is_view(node) and root(node) not in replaced
            if same_view or _is_meta(node) or _is_number(node) or _acts_on_meta(node):
                computable.add(node)
    return computable, created


def _symbols(graph: fx.Graph) -> dict[Any, fx.Node]:
    """The placeholders that are sizes, by their symbols."""
    sizes = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), torch.SymInt)]
    return {node.meta["val"].node.expr: node for node in sizes}


def _is_fresh_meta_tensor(node: fx.Node, symbols: Mapping[Any, fx.Node]) -> bool:
    """Whether a node is a new tensor on meta whose layout follows from the graph's sizes."""
    fresh = _is_meta(node) and not is_view(node) and not is_written(node)
    return fresh and _layout_follows_from(node, symbols) and node.meta["val"].storage_offset() == 0


def _is_read_by(user: fx.Node) -> bool:
    """Whether the user of a value does more with it than return it."""
    return user.op != "output"


def _layout_follows_from(node: fx.Node, symbols: Mapping[Any, fx.Node]) -> bool:
    """Whether shape and strides of a tensor are expressions of these symbols."""
    value: Any = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return False
    layout: Any = (*value.shape, *value.stride())
    plain = not value.is_conj() and not value.is_neg()
    return plain and all(isinstance(n, int) or n.node.expr.free_symbols <= symbols.keys() for n in layout)


def _replaces_storage(node: fx.Node) -> bool:
    """Whether a node replaces the storage or the layout of a tensor, so that views before and after it differ."""
    return is_written(node) and node.target._schema.name in ("aten::set_", "aten::resize_", "aten::resize_as_")  # pyright: ignore


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a number that is computed from sizes, not from the elements of a tensor."""
    if not isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return not is_operation(node) or node.target._schema.name.startswith("aten::sym_")  # pyright: ignore


def _remove(module: fx.GraphModule, results: tuple[int, ...], nodes: set[fx.Node]) -> fx.GraphModule:
    """Copy a graph without these results, and without the nodes of a set that nothing else reads."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, mapping)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    values = [None if index in results else value for index, value in enumerate(output_values(module.graph))]
    graph.output(tuple(mapping[value] if isinstance(value, fx.Node) else value for value in values))
    for old in reversed(module.graph.nodes):
        if old in nodes and old.op != "placeholder" and not mapping[old].users:
            graph.erase_node(mapping[old])
    symbols = _symbols(graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        if _is_meta(node) and _layout_follows_from(node, symbols):
            with graph.inserting_before(first):
                new = _create_on_meta(graph, node.meta["val"], {one: one for one in symbols.values()}, symbols)
            node.replace_all_uses_with(new, delete_user_cb=_is_read_by)
            if not new.users:
                graph.erase_node(new)
    return fx.GraphModule(module, graph)


def _extract(
    module: fx.GraphModule, values: list[fx.Node], updates: list[fx.Node], created: set[fx.Node]
) -> Callable[..., Sequence[Any]]:
    """Extract a function of all inputs that does the updates and returns the values."""
    needed: set[fx.Node] = set()
    waiting = [*values, *updates]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += () if node in created else node.all_input_nodes
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed and node in created:
            mapping[node] = _create_on_meta(graph, node.meta["val"], mapping, _symbols(module.graph))
        elif node.op == "placeholder" or node in needed:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    graph.output([mapping[value] for value in values])
    return fx.GraphModule(module, graph).forward


def _create_on_meta(
    graph: fx.Graph, like: torch.Tensor, mapping: Mapping[fx.Node, fx.Node], symbols: Mapping[Any, fx.Node]
) -> fx.Node:
    """Add a node that creates a tensor on meta with the layout of ``like``, whose sizes may be symbolic."""
    tracer = GraphAppendingTracer(graph)
    sizes = {symbol: fx.Proxy(mapping[node], tracer) for symbol, node in symbols.items()}

    def number(value: Any) -> Any:
        if isinstance(value, int):
            return value
        found: Any = sympy_interp(PythonReferenceAnalysis, sizes, value.node.expr)
        return found.node if isinstance(found, fx.Proxy) else int(found)

    layout = tuple(map(number, like.shape)), tuple(map(number, like.stride()))
    return graph.call_function(aten.empty_strided.default, layout, {"dtype": like.dtype, "device": like.device})
