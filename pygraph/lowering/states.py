"""Moves of attention's states, as graphs need them: see `pygraph.ir.attention_states`."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pygraph.ir.attention_states import draws_again, is_drawn_state, is_state, is_state_on_device, keep, read, read_by
from pygraph.ir.effects import is_random
from pygraph.ir.program import Program, output_values


@dataclasses.dataclass(frozen=True)
class Crossing:
    """The states among the inputs and results of a graph.

    Attributes:
        inputs: Positions of the inputs that attention reads as states.
        results: Per position of a result that is one: whether random numbers were drawn.
    """

    inputs: frozenset[int]
    results: dict[int, bool]

    @classmethod
    def of(cls, graph: fx.Graph) -> Crossing:
        """Find the states among the inputs and results of a graph of ATen operations."""
        position = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
        inputs = {position[value] for node in graph.nodes for value in read_by(node) if value in position}
        results: dict[int, bool] = {}
        for index, value in enumerate(output_values(graph)):
            if isinstance(value, fx.Node) and value.target is operator.getitem:
                source: Any = value.args[0]
                if is_state(source, value.args[1]):  # pyright: ignore
                    results[index] = is_random(source)
        return cls(frozenset(inputs), results)

    def before(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs with states on the device from which operations read them now."""
        if not self.inputs:
            return list(inputs)  # another one: what runs empties it
        return [read(value) if index in self.inputs else value for index, value in enumerate(inputs)]

    def after(self, results: Sequence[Any], device: torch.device) -> list[Any]:
        """The results with all states on the device."""
        if not self.results:
            return list(results)
        return [
            keep(value, device, self.results[index]) if index in self.results else value
            for index, value in enumerate(results)
        ]


def settle(graph: fx.Graph, device: torch.device) -> None:
    """Insert moves of drawn states into a graph of ATen operations, so that it runs captured or not."""
    for node in list(graph.nodes):
        for state in read_by(node):
            _insert_read(graph, state, node)
        if node.users and is_drawn_state(node):
            _insert_keep(graph, node, device, list(node.users))


def settle_between_regions(graph: fx.Graph, device: torch.device) -> None:
    """Insert moves of drawn states that one region makes and another one reads: each may be captured or not.

    Args:
        graph: A graph with the region of each node in its ``meta``.
        device: The device.
    """
    for node in [node for node in graph.nodes if is_drawn_state(node)]:
        elsewhere = [user for user in node.users if user.op != "output" and user.meta["region"] != node.meta["region"]]
        kept = _insert_keep(graph, node, device, elsewhere) if elsewhere else None
        for user in elsewhere:
            if kept in read_by(user):
                _insert_read(graph, kept, user)


def join(graph: fx.Graph) -> None:
    """Have backwards take drawn states as their forwards return them, where both are in one graph.

    IR before::

        seed = operator.getitem(attention, 2)
        kept = pygraph.state_to_keep(seed, device("cuda:0"), True)
        read = pygraph.state_to_read(kept)
        grads = aten._scaled_dot_product_efficient_attention_backward.default(…, read, …)

    IR after::

        seed = operator.getitem(attention, 2)
        grads = aten._scaled_dot_product_efficient_attention_backward.default(…, seed, …)

    Args:
        graph: The graph, which is changed. Where it is cut in regions, `settle_between_regions` has them apart again.
    """
    for kept in graph.find_nodes(op="call_function", target=torch.ops.pygraph.state_to_keep.default):
        state, _, drawn = kept.args
        for user in list(kept.users) if drawn is True else ():
            if user.target is torch.ops.pygraph.state_to_read.default:
                user.replace_all_uses_with(state)
                graph.erase_node(user)
            elif is_state_on_device(user) or draws_again(user):
                user.replace_input_with(kept, state)
        if not kept.users:
            graph.erase_node(kept)
    for there in graph.find_nodes(op="call_function", target=torch.ops.pygraph.state_to_read.default):
        if is_drawn_state(there.args[0]):
            there.replace_all_uses_with(there.args[0])
            graph.erase_node(there)


def _insert_keep(graph: fx.Graph, state: fx.Node, device: torch.device, users: Sequence[fx.Node]) -> fx.Node:
    """Insert a copy of a drawn state on the device, which these users take instead."""
    with graph.inserting_after(state):
        kept = graph.call_function(torch.ops.pygraph.state_to_keep.default, (state, device, True))
    kept.meta = dict(state.meta)
    for user in users:
        user.replace_input_with(state, kept)
    return kept


def _insert_read(graph: fx.Graph, state: fx.Node, reader: fx.Node) -> None:
    """Insert the place of a state from which an operation reads it now, captured or not."""
    with graph.inserting_before(reader):
        there = graph.call_function(torch.ops.pygraph.state_to_read.default, (state,))
    there.meta = {**state.meta, **{name: reader.meta[name] for name in ("region", "order") if name in reader.meta}}
    reader.replace_input_with(state, there)


def settle_program(program: Program) -> Program:
    """A Program whose forward and backward may become graphs of their own.

    IR before::

        attention = aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.1)
        seed = operator.getitem(attention, 2)
        grads = aten._scaled_dot_product_efficient_attention_backward.default(…, seed, …)

    IR after::

        attention = aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.1)
        seed = operator.getitem(attention, 2)
        kept = pygraph.state_to_keep(seed, device("cuda:0"), True)
        read = pygraph.state_to_read(kept)
        grads = aten._scaled_dot_product_efficient_attention_backward.default(…, read, …)

    Args:
        program: A Program at stage ``aten``; without such operations it is returned as it is.

    Returns:
        A Program at the same stage.
    """
    if program.device.type != "cuda" or not any(map(read_by, program.nodes)):
        return program
    module = program.copy_graph()
    settle(module.graph, program.device)
    module.recompile()
    return program.replace(module=module)
