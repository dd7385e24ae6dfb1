"""The forward of a joint graph: a Program of its results, and of the values that the backward needs of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pygraph.autograd.joint_graph import JointGraph, with_dependencies
from pygraph.ir.descriptors import Alias, Captured, Input, Mutation, Output, Result, Static
from pygraph.ir.effects import has_effect
from pygraph.ir.program import Program, graph_module


def forward_program(joint: JointGraph, saved: Sequence[fx.Node], pullback: object) -> Program:
    """Return the Program of a joint graph's results and saved values.

    Args:
        joint: The joint graph.
        saved: The nodes to save.
        pullback: The constant third part of the Program's result, ``(result, saved, pullback)``.
    """
    program = joint.program
    outputs: list[Output] = []
    values: list[fx.Node] = []
    number_of: dict[int, int] = {}
    for number, (descriptor, value) in enumerate(zip(program.outputs, program.results, strict=True)):
        if joint.is_forward_output(number, descriptor):
            number_of[number] = len(outputs)
            outputs.append(descriptor)
            values.append(value)
    aliases = [
        dataclasses.replace(alias, index=number_of[alias.index]) if alias.of == "output" else alias
        for alias in program.aliases
        if not joint.is_gradient(alias.leaf)
    ]
    saved_leaves = range(joint.result_leaves, joint.result_leaves + len(saved))
    for leaf, node in zip(saved_leaves, saved, strict=True):
        path, spec = f"result[1][{leaf - joint.result_leaves}]", dataclasses.replace(node.meta["spec"], offset=0)
        shared = [i for i, v in enumerate(values) if v is node and isinstance(outputs[i], Result)]
        if shared:  # memory that results are views of
            aliases.append(Alias(path, leaf, "output", shared[0], spec))
        else:
            outputs.append(Result(path, leaf, spec, is_saved=True))
            values.append(node)
    pullback_leaf = joint.result_leaves + len(saved)
    statics = [static for static in program.statics if not joint.is_gradient(static.leaf)]
    statics.append(Static("result[2]", pullback_leaf, pullback))
    out_tree = pytree.treespec_tuple([joint.result_tree, *map(pytree.tree_structure, (tuple(saved_leaves), 0))])
    return _extracted(joint, outputs, values, aliases, statics, out_tree)


def _extracted(
    joint: JointGraph,
    outputs: Sequence[Output],
    values: Sequence[fx.Node],
    aliases: Sequence[Alias],
    statics: Sequence[Static],
    out_tree: pytree.TreeSpec,
) -> Program:
    """Return the joint Program without backward nodes, and without captured tensors that only these read."""
    program = joint.program
    effects = [n for n in program.nodes if n.op == "call_function" and has_effect(n)]
    used = with_dependencies([*values, *(node for node in effects if node not in joint.backward_nodes)])
    inputs: list[Input] = []
    input_of: dict[int, int] = {}
    aliased = {alias.index for alias in aliases if alias.of == "input"} | joint.written
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in program.nodes:
        descriptor = joint.descriptor_of.get(node)
        if descriptor is not None:
            number = joint.input_number[node]
            if isinstance(descriptor, Captured) and node not in used and number not in aliased:
                continue
            input_of[number] = len(inputs)
            inputs.append(descriptor)
        elif node.op == "output" or node in joint.backward_nodes or node not in used:
            continue
        mapping[node] = graph.node_copy(node, lambda source: mapping[source])
        mapping[node].meta = dict(node.meta)
    graph.output(tuple(map_arg(list(values), lambda value: mapping[value])))
    return program.replace(
        module=graph_module(program.module, graph),
        inputs=tuple(inputs),
        outputs=tuple(Mutation(input_of[d.input]) if isinstance(d, Mutation) else d for d in outputs),
        aliases=tuple(
            dataclasses.replace(alias, index=input_of[alias.index]) if alias.of == "input" else alias
            for alias in aliases
        ),
        statics=tuple(statics),
        out_tree=out_tree,
        history=(*program.history, "partition"),
    )
