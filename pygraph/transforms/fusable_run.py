"""Runs of operations as graphs of their own, with the inputs, results and updates that Inductor compiles them for."""

# An anchor in a graph is a private attribute. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pygraph.ir.decisions import decisions_among
from pygraph.ir.descriptors import Captured, Mutation, TensorSpec
from pygraph.ir.effects import is_first_gradient, is_view, root
from pygraph.ir.program import Program

aten = torch.ops.aten


class FusableRun:
    """A run of a Program's nodes as a graph of their own.

    Args:
        program: The Program.
        nodes: The nodes, in order.
        before: The work that runs before them.

    Attributes:
        module: The graph; updates of inputs are ``copy_`` at its end.
        inputs: The nodes outside that it takes; it makes views of them itself.
        specs: The specs of ``inputs``.
        outputs: The nodes that are needed outside, in the order in which they are returned.
        updates: Positions among the Program's outputs of the updates of inputs that the graph makes.
        updated: Nodes of the run that are needed outside, and the inputs that have their contents afterwards.
        begins: Positions among ``inputs`` of gradients that backwards begin with, which are made outside.
        static: Positions among ``inputs`` of parameters, buffers and what else the function closes over.
    """

    def __init__(self, program: Program, nodes: Sequence[fx.Node], before: set[fx.Node]) -> None:
        nodes = [node for node in nodes if not is_first_gradient(node)]
        self._inside, self._before = set(nodes), before
        self._graph = fx.Graph()
        self._env: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self._anchor: fx.Node | None = None
        for node in nodes:
            self._env[node] = self._graph.node_copy(node, self._local)
        self.updated = dict[fx.Node, fx.Node]()
        self.updates = self._take_updates(program)
        values = [value for position, value in enumerate(program.results) if position not in self.updates]
        needed = [node for node in nodes if _is_needed(node, self._inside, values) and not _is_tuple(node)]
        returned = {root(value) for value in values if isinstance(value, fx.Node)}
        self.updated = {node: self.updated[node] for node in needed if node in self.updated and node not in returned}
        self.outputs = [node for node in needed if node not in self.updated]
        self._graph.output(tuple(self._env[node] for node in self.outputs))
        for node in self._graph.find_nodes(op="call_function", target=aten.view.default):
            node.target = aten.reshape.default  # decompositions may lay tensors out in other ways than eager
        self.module = fx.GraphModule(torch.nn.Module(), self._graph)
        self.specs: list[TensorSpec] = [node.meta["spec"] for node in self.inputs]
        captured = {
            node for node, what in zip(program.placeholders, program.inputs, strict=True) if isinstance(what, Captured)
        }
        self.begins = frozenset(index for index, node in enumerate(self.inputs) if is_first_gradient(node))
        self.static = frozenset(index for index, node in enumerate(self.inputs) if node in captured)

    def _local(self, node: fx.Node) -> fx.Node:
        if node not in self._env:
            self._env[node] = self._graph.node_copy(node, self._local) if is_view(node) else self._placeholder(node)
        return self._env[node]

    def _placeholder(self, node: fx.Node) -> fx.Node:
        anchor = self._graph._root if self._anchor is None else self._anchor
        with self._graph.inserting_after(anchor):
            self._anchor = self._graph.placeholder(f"arg{len(self.inputs)}")
        self.inputs.append(node)
        return self._anchor

    def _take_updates(self, program: Program) -> tuple[int, ...]:
        """Write new contents of inputs to their memory, where no node outside reads the old ones later."""
        placeholders = program.placeholders
        values = program.results
        taken: list[int] = []
        if any(decision not in self._before for decision in decisions_among(program.nodes)):
            return ()  # nothing is updated before decisions are made
        for position, descriptor in enumerate(program.outputs):
            if not isinstance(descriptor, Mutation):
                continue
            value, target = values[position], placeholders[descriptor.input]
            if not isinstance(value, fx.Node) or root(value) not in self._inside:
                continue
            others = [other for index, other in enumerate(values) if index != position]
            if target.meta["spec"].device.type != "cuda" or _is_needed(target, self._inside | self._before, others):
                continue
            self._graph.call_function(aten.copy_.default, (self._local(target), self._local(value)))
            taken.append(position)
            if value.meta["spec"] == target.meta["spec"]:
                self.updated[value] = target
        return tuple(taken)


def _is_needed(node: fx.Node, inside: set[fx.Node], values: Sequence[Any]) -> bool:
    """Whether a node outside of a run, or one of these values, takes a node or a view of it."""
    wanted = {value for value in values if isinstance(value, fx.Node)}
    pending, seen = [node], set[fx.Node]()
    while pending:
        one = pending.pop()
        if one in wanted:
            return True
        for user in one.users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if is_view(user):
                pending.append(user)
            elif user not in inside:
                return True
    return False


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("spec"), tuple)
