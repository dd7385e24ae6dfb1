"""Lowering to one kernel per ATen operation: updates become writes, in place where nobody needs the old contents."""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from pygraph.effects import has_effect, is_operation, root, written_arguments
from pygraph.errors import StageError, describe
from pygraph.lowering.in_place import restore_writes
from pygraph.program import Mutation, Program, TensorSpec, output_values

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
        sum = aten.sum.default(index_put_)
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
    output = graph.output_node()
    restore_writes(graph, program)
    _drop_copies(graph, program)
    values = output_values(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    updates = [
        (placeholders[descriptor.input], values[position])
        for position, descriptor in enumerate(program.outputs)
        if isinstance(descriptor, Mutation)
    ]
    kept = [position for position, descriptor in enumerate(program.outputs) if not isinstance(descriptor, Mutation)]
    output.args = (tuple(values[position] for position in kept),)
    _write(graph, updates)
    _own_results(graph)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    module.recompile()
    moved = {old: new for new, old in enumerate(kept)}
    aliases = tuple(
        dataclasses.replace(alias, index=moved[alias.index]) if alias.of == "output" else alias
        for alias in program.aliases
    )
    return program.replace(
        module=module,
        outputs=tuple(program.outputs[position] for position in kept),
        aliases=aliases,
        stage="kernels",
        history=(*program.history, "lower"),
    )


def _drop_copies(graph: fx.Graph, program: Program) -> None:
    """Replace ``copy(old, new)`` by ``new`` where nobody can tell: not in results, which own their memory."""
    last_write = {root(a): order for order, node in enumerate(graph.nodes) for a in written_arguments(node)}
    results = {
        root(value)
        for value, descriptor in zip(output_values(graph), program.outputs, strict=True)
        if isinstance(value, fx.Node) and not isinstance(descriptor, Mutation)
    }
    for order, node in enumerate(list(graph.nodes)):
        if node.target is not aten.copy.default or node.args[1].meta["spec"] != node.meta["spec"] or node in results:
            continue
        if last_write.get(root(node.args[1]), -1) < order:  # what is written later is another tensor in eager
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)


def _write(graph: fx.Graph, updates: list[tuple[fx.Node, fx.Node]]) -> None:
    """Write each update's value to its input's memory."""
    targets = {target for target, _ in updates}
    output = graph.output_node()
    pending: list[tuple[fx.Node, fx.Node]] = []
    for target, value in updates:
        if value is target:
            continue
        in_place = _in_place_overload(value, target, {v for t, v in updates if t is not target}, output)
        if in_place is not None:
            value.target = in_place
        else:
            pending.append((target, value))
    with graph.inserting_before(output):
        ready: list[tuple[fx.Node, fx.Node]] = []
        for target, value in pending:
            if root(value) in targets:  # another write, or this one where it overlaps, would change what it reads
                value = _node_like(graph, aten.clone.default, (value,), value)
            ready.append((target, value))
        for target, value in ready:
            _node_like(graph, aten.copy_.default, (target, value), target, source=value.meta.get("source"))


def _own_results(graph: fx.Graph) -> None:
    """Copy results that are views of inputs but no aliases of them in eager (empty ones)."""
    output = graph.output_node()
    values = output_values(graph)
    for position, value in enumerate(values):
        if not isinstance(value, fx.Node) or not isinstance(value.meta["spec"], TensorSpec):
            continue
        if root(value).op == "placeholder":
            with graph.inserting_before(output):
                values[position] = _node_like(graph, aten.clone.default, (value,), value)
    output.args = (tuple(values),)


def _node_like(
    graph: fx.Graph, op: torch._ops.OpOverload, args: tuple[fx.Node, ...], like: fx.Node, source: str | None = None
) -> fx.Node:
    node = graph.call_function(op, args)
    node.meta = {"spec": like.meta["spec"], "source": source or like.meta.get("source")}
    return node


def _in_place_overload(
    value: fx.Node, target: fx.Node, others: set[fx.Node], output: fx.Node
) -> torch._ops.OpOverload | None:
    """The in-place twin of the operation that makes ``value``, if it may write straight to ``target``."""
    if not is_operation(value) or not value.args or value.args[0] is not target or value in others:
        return None
    if value.meta["spec"] != target.meta["spec"] or output in value.users:
        return None
    if any(root(other) is target for other in others):
        return None  # another input is updated with the old contents, at the end
    spec = value.meta["spec"]
    if not isinstance(spec, TensorSpec) or spec.span != _numel(spec):
        return None  # overlapping or strided memory keeps to the plain copy
    functional = value.target
    assert isinstance(functional, torch._ops.OpOverload)
    namespace, name = functional._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    overload = getattr(packet, functional._overloadname, None)
    if overload is None or len(functional._schema.returns) != 1:
        return None
    ours = [(a.name, str(a.type)) for a in functional._schema.arguments]
    theirs = [(a.name, str(a.type)) for a in overload._schema.arguments]
    if ours != theirs:
        return None
    # Nothing may read the old contents afterwards, neither the input itself nor a view of it; and the operation
    # must not read the memory that it writes through another argument.
    seen = False
    for node in value.graph.nodes:
        if node is value:
            seen = True
            if sum(root(argument) is target for argument in _argument_nodes(node)) > 1:
                return None
        elif seen and any(root(argument) is target for argument in node.all_input_nodes):
            return None
    return overload


def _argument_nodes(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda argument: found.append(argument) or argument)  # pyright: ignore
    return found


def _numel(spec: TensorSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return count


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
