"""Operations that write to their arguments, restored from their functional variants.

An operation writes straight to the memory that it writes to in eager, so nothing is copied. Only constants of the
trace are copied first: eager makes them anew in every call.
"""

# torch has no public names for operator overloads and their tags. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import Mutation, TensorSpec
from pygraph.ir.effects import root
from pygraph.ir.functional_variants import mutating_operation_of, written_values
from pygraph.ir.program import Program
from pygraph.ir.scopes import came_from

aten = torch.ops.aten


def restore_writes(graph: fx.Graph, program: Program) -> None:
    """Replace every functional variant in ``graph``, an edited copy of the one of ``program``, by its operation.

    IR before::

        empty = aten.empty_like.default(x)
        new = torch.ops.pygraph_functional.lib_fill.default(empty, 2)
        return (new,)

    IR after::

        empty = aten.empty_like.default(x)
        fill = torch.ops.lib.fill.default(empty, 2)
        return (empty,)
    """
    for node in list(graph.nodes):
        op = mutating_operation_of(node.target)
        if op is not None:
            _restore(graph, node, op, program)


def is_write_back(node: fx.Node) -> bool:
    """Whether a node copies what a functional variant returns to the tensor that its operation writes to by itself."""
    if node.target is not aten.copy.default or node.args[1].meta["spec"] != node.meta["spec"]:  # pyright: ignore
        return False
    source: Any = node.args[1]
    while source.target is operator.getitem:
        source = source.args[0]
    return mutating_operation_of(source.target) is not None


def _restore(graph: fx.Graph, node: fx.Node, op: torch._ops.OpOverload, program: Program) -> None:
    count = len(op._schema.returns)
    written = written_values(op, node.args, node.kwargs)
    total = count + len(written)
    memory: dict[fx.Node, fx.Node] = {}
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for position, value in enumerate(written):
        entry = [node] if total == 1 else _selections(node, count + position)
        items: list[tuple[int | None, fx.Node]] = [(None, value)]
        if isinstance(value, (list, tuple)):
            items = list(enumerate(value))  # pyright: ignore[reportUnknownArgumentType]
        for index, old in items:
            news = entry if index is None else [n for each in entry for n in _selections(each, index)]
            for new in news:
                _absorb_copy(graph, old, new)
            if old not in memory:
                free = _may_overwrite(old, program)
                memory[old] = old if free else _copy_before(graph, node, old)
            replaced += [(new, memory[old]) for new in news]
    with graph.inserting_before(node):
        swapped = _with_memory(node, op, memory)
        call = graph.call_function(op, *swapped)
    spec = node.meta["spec"]
    specs = (spec,) if total == 1 else tuple(spec)
    call.meta = {**node.meta, "spec": None if not count else specs[0] if count == 1 else specs[:count]}
    for new, target in replaced:
        new.replace_all_uses_with(target)
    for position in range(count):
        for selection in _selections(node, position):
            if count == 1:
                selection.replace_all_uses_with(call)
            else:
                selection.args = (call, position)
    _erase(graph, node)


def _selections(node: fx.Node, index: int) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == index]


def _absorb_copy(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Drop the copy of new contents to the written tensor: the operation writes them there, or to a copy of its own."""
    for user in list(new.users):
        if user.target is aten.copy.default and user.args == (old, new) and user.meta["spec"] == new.meta["spec"]:
            user.replace_all_uses_with(new)
            graph.erase_node(user)
            return


def _may_overwrite(old: fx.Node, program: Program) -> bool:
    """Whether the operation may write to the memory of ``old`` itself, as it does in eager.

    Contents that the eager function overwrites cannot be read later: code that needs them has copied them before, and
    that copy is a node. So it may, unless the memory is a constant of the trace, which eager makes anew.
    """
    spec = old.meta["spec"]
    if not isinstance(spec, TensorSpec) or spec.overlaps_itself:
        return False
    origin = root(old)
    if origin.op != "placeholder":
        return True
    number = [node for node in old.graph.nodes if node.op == "placeholder"].index(origin)
    return any(isinstance(descriptor, Mutation) and descriptor.input == number for descriptor in program.outputs)


def _copy_before(graph: fx.Graph, node: fx.Node, old: fx.Node) -> fx.Node:
    """A copy of ``old`` with the same strides."""
    spec = old.meta["spec"]
    with graph.inserting_before(node):
        if not isinstance(spec, TensorSpec) or not (spec.has_gaps or spec.overlaps_itself):
            copy = graph.call_function(aten.clone.default, (old,))
        else:
            options: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
            copy = graph.call_function(aten.empty_strided.default, (list(spec.shape), list(spec.stride)), options)
            write = graph.call_function(aten.copy_.default, (copy, old))
            write.meta = {**old.meta, **came_from(node)}
    copy.meta = {**old.meta, **came_from(node)}
    return copy


def _with_memory(
    node: fx.Node, op: torch._ops.OpOverload, memory: dict[fx.Node, fx.Node]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``node``, with the memory that it writes to instead of its old contents."""

    def swap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [swap(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return None if value is None else memory[value]

    args, kwargs = list(node.args), dict(node.kwargs)
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args):
            args[position] = swap(args[position])
        elif argument.name in kwargs:
            kwargs[argument.name] = swap(kwargs[argument.name])
    return tuple(args), kwargs


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Remove a node with the selections of its results, which are unused."""
    for user in list(node.users):
        if user.target is operator.getitem and not user.users:
            _erase(graph, user)
    if not node.users:
        graph.erase_node(node)
