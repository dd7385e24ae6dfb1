"""What a graph of AOTAutograd's returns that needs no device: views of inputs that require grad, and tensors on meta.

Both are made by their own few operations after each replay, on the inputs of that call, as eager makes them: so a view
is of the very tensor that was passed, and a tensor on meta, which has no memory, is a new one of this call's sizes.
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

from pygraph.ir.effects import is_operation, is_view, is_written, root, written_arguments
from pygraph.ir.program import output_values

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Parts:
    """A graph, and what is run beside it.

    Attributes:
        module: The graph; in its results, those that are made beside it are None.
        made: Makes these results, in order, from all inputs of the graph.
        results: Their positions among all results.
        unused: Positions of the inputs on meta, in the place of which it has new tensors, if it needs any.
    """

    module: fx.GraphModule
    made: Callable[..., Sequence[Any]]
    results: tuple[int, ...]
    unused: tuple[int, ...]


def apart(module: fx.GraphModule, inputs: Sequence[Any]) -> Parts | None:
    """Take from a graph what needs no device.

    Args:
        module: The graph; its nodes say in ``meta["val"]`` what they are.
        inputs: All inputs of a call.

    Returns:
        The graph and what is beside it; None if there is nothing.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    differentiable = {
        node
        for node, value in zip(placeholders, inputs, strict=True)
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    values = output_values(module.graph)
    on_meta = any(map(_is_meta, module.graph.nodes))
    if not on_meta and not any(isinstance(one, fx.Node) and is_view(one) for one in values):
        return None
    known, new = _known(module.graph)
    results = tuple(
        index
        for index, value in enumerate(values)
        if isinstance(value, fx.Node) and value in known and value.op != "placeholder"
        and (_is_meta(value) or (is_view(value) and root(value) in differentiable))
    )  # fmt: skip
    updates = [node for node in module.graph.nodes if node in known and _acts_on_meta(node)]
    rest = _without(module, results, {node for node in known if _is_meta(node)} | set(updates)) if on_meta else module
    unused = tuple(
        index
        for index, (old, now) in enumerate(zip(placeholders, rest.graph.find_nodes(op="placeholder"), strict=True))
        if _is_meta(old) and not any(map(_reads, now.users))
    )
    if not results and not updates and not unused:
        return None
    made = _only(module, [values[index] for index in results], updates, new)
    return Parts(rest, made, results, unused)


def _is_meta(node: fx.Node) -> bool:
    """Whether all that a node is are tensors on meta."""
    value = node.meta.get("val")
    items: Any = value if isinstance(value, (list, tuple)) else (value,)
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def _acts_on_meta(node: fx.Node) -> bool:
    """Whether a node is run for what it does to, or checks of, tensors on meta alone."""
    if not is_operation(node):
        return False
    if is_written(node):
        return all(map(_is_meta, written_arguments(node)))
    tensors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    return not node.target._schema.returns and bool(tensors) and all(map(_is_meta, tensors))  # pyright: ignore


def _known(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Nodes that can be run without the rest: on meta, views, and the numbers that these need.

    The second set holds those among them in whose place a new tensor is made, whatever they are made of.
    """
    symbols = _symbols(graph)
    replaced = {root(node.args[0]) for node in graph.nodes if _gives_other_memory(node)}  # pyright: ignore
    known: set[fx.Node] = set()
    new: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            known.add(node)
        elif node.op != "call_function":
            continue
        elif _is_new_on_meta(node, symbols):
            known.add(node)
            new.add(node)
        elif all(one in known for one in node.all_input_nodes):
            alike = is_view(node) and root(node) not in replaced
            if alike or _is_meta(node) or _is_number(node) or _acts_on_meta(node):
                known.add(node)
    return known, new


def _symbols(graph: fx.Graph) -> dict[Any, fx.Node]:
    """The placeholders that are sizes, by their symbols."""
    sizes = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), torch.SymInt)]
    return {node.meta["val"].node.expr: node for node in sizes}


def _is_new_on_meta(node: fx.Node, symbols: Mapping[Any, fx.Node]) -> bool:
    """Whether a node is a new tensor on meta, the layout of which can be told from the graph's sizes."""
    new = _is_meta(node) and not is_view(node) and not is_written(node)
    return new and _has_layout_of(node, symbols) and node.meta["val"].storage_offset() == 0


def _reads(user: fx.Node) -> bool:
    """Whether a node does more with a value than return it."""
    return user.op != "output"


def _has_layout_of(node: fx.Node, symbols: Mapping[Any, fx.Node]) -> bool:
    """Whether sizes say how the elements of a tensor lie in memory."""
    value: Any = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return False
    layout: Any = (*value.shape, *value.stride())
    plain = not value.is_conj() and not value.is_neg()
    return plain and all(isinstance(n, int) or n.node.expr.free_symbols <= symbols.keys() for n in layout)


def _gives_other_memory(node: fx.Node) -> bool:
    """Whether a node changes where a tensor lies, after which views of it are others."""
    return is_written(node) and node.target._schema.name in ("aten::set_", "aten::resize_", "aten::resize_as_")  # pyright: ignore


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a number that is computed of sizes, not of what a tensor holds."""
    if not isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    return not is_operation(node) or node.target._schema.name.startswith("aten::sym_")  # pyright: ignore


def _without(module: fx.GraphModule, results: tuple[int, ...], nodes: set[fx.Node]) -> fx.GraphModule:
    """The graph without these results, and without those of the nodes that nothing else needs."""
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
        if _is_meta(node) and _has_layout_of(node, symbols):
            with graph.inserting_before(first):
                new = _new_on_meta(graph, node.meta["val"], {one: one for one in symbols.values()}, symbols)
            node.replace_all_uses_with(new, delete_user_cb=_reads)
            if not new.users:
                graph.erase_node(new)
    return fx.GraphModule(module, graph)


def _only(
    module: fx.GraphModule, values: list[fx.Node], updates: list[fx.Node], new: set[fx.Node]
) -> Callable[..., Sequence[Any]]:
    """A function of all inputs that makes these values alone, and the updates."""
    needed: set[fx.Node] = set()
    waiting = [*values, *updates]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += () if node in new else node.all_input_nodes
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in needed and node in new:
            mapping[node] = _new_on_meta(graph, node.meta["val"], mapping, _symbols(module.graph))
        elif node.op == "placeholder" or node in needed:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    graph.output([mapping[value] for value in values])
    return fx.GraphModule(module, graph).forward


def _new_on_meta(
    graph: fx.Graph, like: torch.Tensor, mapping: Mapping[fx.Node, fx.Node], symbols: Mapping[Any, fx.Node]
) -> fx.Node:
    """A node that makes a tensor on meta."""
    tracer = GraphAppendingTracer(graph)
    sizes = {symbol: fx.Proxy(mapping[node], tracer) for symbol, node in symbols.items()}

    def number(value: Any) -> Any:
        if isinstance(value, int):
            return value
        found: Any = sympy_interp(PythonReferenceAnalysis, sizes, value.node.expr)
        return found.node if isinstance(found, fx.Proxy) else int(found)

    layout = tuple(map(number, like.shape)), tuple(map(number, like.stride()))
    return graph.call_function(aten.empty_strided.default, layout, {"dtype": like.dtype, "device": like.device})
