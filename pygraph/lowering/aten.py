"""Lowering to one kernel per ATen operation: updates become writes, in place where no node needs the old contents."""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from pygraph.errors import StageError, describe
from pygraph.ir.descriptors import Mutation, TensorSpec
from pygraph.ir.effects import has_effect, root, written_arguments
from pygraph.ir.order import note_order
from pygraph.ir.program import Program, output_values
from pygraph.lowering.in_place import restore_writes
from pygraph.lowering.index_gradients import add_in_place
from pygraph.lowering.statistics import update_statistics
from pygraph.lowering.updates import node_like, write_updates

aten = torch.ops.aten


def lower(program: Program) -> Program:
    """Make every update of an input an explicit write to its memory.

    IR before::

        index_put = aten.index_put.default(cache, [position], value)
        sum = aten.sum.default(index_put)
        return (index_put,  # new contents of cache
                sum)

    IR after::

        index_put_ = aten.index_put_.default(cache, [position], value)
        sum = aten.sum.default(cache)
        return (sum,)

    Args:
        program: A Program at stage ``aten``; at ``kernels`` it is returned as it is.

    Returns:
        A Program at stage ``kernels`` without Mutation outputs.

    Raises:
        StageError: The Program is further than that.
    """
    if program.stage == "kernels":
        return program
    if program.stage != "aten":
        raise StageError(describe(f"lower({program.name})", f"stage {program.stage!r}", expected="'aten'"))
    module = program.copy_graph()
    graph = module.graph
    note_order(graph)
    output = graph.output_node()
    add_in_place(graph)
    restore_writes(graph, program)
    _drop_copies(graph, program)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    mutated = {placeholders[descriptor.input] for descriptor in program.outputs if isinstance(descriptor, Mutation)}
    update_statistics(graph, mutated)
    values = output_values(graph)
    updates = [
        (placeholders[descriptor.input], values[position])
        for position, descriptor in enumerate(program.outputs)
        if isinstance(descriptor, Mutation)
    ]
    results = [position for position, descriptor in enumerate(program.outputs) if not isinstance(descriptor, Mutation)]
    output.args = (tuple(values[position] for position in results),)
    write_updates(graph, updates)
    _own_results(graph)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    module.recompile()
    moved = {old: new for new, old in enumerate(results)}
    aliases = tuple(
        dataclasses.replace(alias, index=moved[alias.index]) if alias.of == "output" else alias
        for alias in program.aliases
    )
    return program.replace(
        module=module,
        outputs=tuple(program.outputs[position] for position in results),
        aliases=aliases,
        stage="kernels",
        history=(*program.history, "lower"),
    )


def _drop_copies(graph: fx.Graph, program: Program) -> None:
    """Replace ``copy(old, new)`` by ``new`` where that changes nothing: not in results, which own their memory."""
    last_write = {root(a): order for order, node in enumerate(graph.nodes) for a in written_arguments(node)}
    results = {
        root(value)
        for value, descriptor in zip(output_values(graph), program.outputs, strict=True)
        if isinstance(value, fx.Node) and not isinstance(descriptor, Mutation)
    }
    for order, node in enumerate(list(graph.nodes)):
        if node.target is not aten.copy.default or node.args[1].meta["spec"] != node.meta["spec"] or node in results:
            continue
        # What is written later, be it what is copied or the copy, is another tensor in eager.
        if max(last_write.get(root(node.args[1]), -1), last_write.get(node, -1)) < order:
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)


def _own_results(graph: fx.Graph) -> None:
    """Copy results that are views of inputs but no aliases of them in eager (empty ones)."""
    output = graph.output_node()
    values = output_values(graph)
    for position, value in enumerate(values):
        if not isinstance(value, fx.Node) or not isinstance(value.meta["spec"], TensorSpec):
            continue
        if root(value).op == "placeholder":
            with graph.inserting_before(output):
                values[position] = node_like(graph, aten.clone.default, (value,), value)
    output.args = (tuple(values),)


def written_inputs(program: Program) -> set[int]:
    """Numbers of the inputs whose memory the Program updates, at any stage."""
    written = {descriptor.input for descriptor in program.outputs if isinstance(descriptor, Mutation)}
    number = {node: index for index, node in enumerate(program.placeholders)}
    for node in program.nodes:
        for argument in written_arguments(node):
            origin = root(argument)
            if origin in number:
                written.add(number[origin])
    return written
