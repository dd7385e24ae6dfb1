"""Updates of inputs as writes to their memory: in place by the operations that make the new contents, else by a copy.

A functional trace says what an input holds at the end. Where eager has changed it in one or several steps, each by an
operation that writes to what it reads, the same operations with an underscore do so again::

    mul = aten.mul.Tensor(average, 0.9)             aten.mul_.Tensor(average, 0.9)
    add = aten.add.Tensor(mul, gradient)            aten.add_.Tensor(average, gradient)
    return (add,)  # new contents of average

The operations on lists, of which torch's optimizers are made, write to all that they read, or to nothing.
"""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from pygraph.ir.decisions import decisions_among
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import argument_nodes, asked_failures, is_operation, root
from pygraph.ir.program import output_values
from pygraph.ir.scopes import came_from

aten = torch.ops.aten


def write_updates(graph: fx.Graph, updates: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Write the new contents of inputs to their memory.

    Args:
        graph: A graph that returns its results only.
        updates: Placeholders, and the nodes that are their new contents.
    """
    changed = [(target, value) for target, value in updates if value is not target]
    chains = _chains(graph, changed)
    _run_in_place(graph, chains)
    in_place = {chain.target for chain in chains}
    _copy(graph, [update for update in changed if update[0] not in in_place], updates)


def node_like(
    graph: fx.Graph, op: torch._ops.OpOverload, args: tuple[fx.Node, ...], like: fx.Node, of: fx.Node | None = None
) -> fx.Node:
    """A new node with the spec of another, which comes from the line of ``of`` and runs at its time."""
    node = graph.call_function(op, args)
    of = like if of is None else of
    source = of.meta.get("source") or like.meta.get("source")
    node.meta = {"spec": like.meta["spec"], **came_from(of), "source": source, "order": root(of).meta.get("order")}
    return node


def _copy(
    graph: fx.Graph, pending: Sequence[tuple[fx.Node, fx.Node]], updates: Sequence[tuple[fx.Node, fx.Node]]
) -> None:
    """Write values to inputs at the end, as if all were written at once."""
    targets = {target for target, _ in updates}
    with graph.inserting_before(graph.output_node()):
        ready: list[tuple[fx.Node, fx.Node]] = []
        for target, value in pending:
            if root(value) in targets:  # another write, or this one where it overlaps, would change what it reads
                value = node_like(graph, aten.clone.default, (value,), value)
            ready.append((target, value))
        for target, value in ready:
            node_like(graph, aten.copy_.default, (target, value), target, of=value)


# ---- updates in place ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _InPlace:
    """One operation of an update, which can write to the memory that it reads.

    Attributes:
        operation: The functional operation.
        overload: Its overload that writes to its first argument.
        index: The position of the value among its results; None if it has one result.
        value: The contents after it.
    """

    operation: fx.Node
    overload: torch._ops.OpOverload
    index: int | None
    value: fx.Node


@dataclasses.dataclass(frozen=True)
class _Chain:
    """The operations that make the new contents of an input, each from the result of the one before.

    Attributes:
        target: The input.
        steps: In the order in which they run.
    """

    target: fx.Node
    steps: tuple[_InPlace, ...]


def _chains(graph: fx.Graph, updates: Sequence[tuple[fx.Node, fx.Node]]) -> list[_Chain]:
    """The updates whose steps may all run in place."""
    found = [chain for target, value in updates if (chain := _chain(target, value)) is not None]
    found = _without_decisive(graph, found)
    if not found:
        return []
    readers = _Readers(graph, updates)
    found = [chain for chain in found if readers.allow(chain)]
    while True:
        # Two inputs cannot be the memory of one value, and an operation on lists runs in place for all of them.
        covered: dict[fx.Node, list[int | None]] = {}
        for chain in found:
            for step in chain.steps:
                covered.setdefault(step.operation, []).append(step.index)
        whole = {operation for operation, indices in covered.items() if _is_whole(operation, indices)}
        remaining = [chain for chain in found if all(step.operation in whole for step in chain.steps)]
        if len(remaining) == len(found):
            return remaining
        found = remaining


def _without_decisive(graph: fx.Graph, chains: list[_Chain]) -> list[_Chain]:
    """The chains of which no step computes what a decision depends on, or an operation that may fail.

    Nothing is updated before a decision is made.
    """
    waiting = [*decisions_among(graph.nodes), *asked_failures(list(graph.nodes))]
    if not waiting:
        return chains
    decisive: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in decisive:
            decisive.add(node)
            waiting += node.all_input_nodes
    return [chain for chain in chains if not any(step.operation in decisive for step in chain.steps)]


def _is_whole(operation: fx.Node, indices: Sequence[int | None]) -> bool:
    """Whether these are all results of an operation, each once, and none is selected a second time."""
    first: Any = operation.args[0]
    if not isinstance(first, (list, tuple)):
        return list(indices) == [None]
    every: list[int] = list(range(len(first)))  # pyright: ignore
    return sorted(index for index in indices if index is not None) == every and len(operation.users) == len(every)


def _chain(target: fx.Node, value: fx.Node) -> _Chain | None:
    """The steps from an input to its new contents; None if one of them is not of a kind that runs in place."""
    spec = target.meta["spec"]
    if not isinstance(spec, TensorSpec) or spec.has_gaps or spec.overlaps_itself:
        return None  # such memory is written by the plain copy
    steps: list[_InPlace] = []
    while value is not target:
        if not isinstance(value, fx.Node):  # pyright: ignore[reportUnnecessaryIsInstance]  # an operand may be a number
            return None
        operation: Any = value
        index: Any = None
        if value.target is operator.getitem:
            operation, index = value.args
        overload = _in_place_overload(operation.target) if is_operation(operation) and operation.args else None
        if overload is None or value.meta["spec"] != spec:
            return None
        source: Any = operation.args[0]
        if (index is not None) != isinstance(source, (list, tuple)):
            return None
        if index is not None and spec.device.type == "cpu":
            return None  # an operation without results does not show that it is work of the host alone
        steps.append(_InPlace(operation, overload, index, value))
        value = source if index is None else source[index]
    return _Chain(target, tuple(reversed(steps)))


@functools.cache
def _in_place_overload(functional: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload of a functional operation that writes to its first argument; asked for each entry of long lists."""
    if len(functional._schema.returns) != 1:
        return None
    namespace, name = functional._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    overload = getattr(packet, functional._overloadname, None)
    if overload is None:
        return None
    ours = [(a.name, str(a.type)) for a in functional._schema.arguments]
    theirs = [(a.name, str(a.type)) for a in overload._schema.arguments]
    return overload if ours == theirs else None


class _Readers:
    """The readers of memory in a functional graph, and when they run.

    Args:
        graph: The graph.
        updates: Inputs and their new contents, which are read at the end.
    """

    def __init__(self, graph: fx.Graph, updates: Sequence[tuple[fx.Node, fx.Node]]) -> None:
        self._order = {node: order for order, node in enumerate(graph.nodes)}
        self._reads: dict[fx.Node, list[fx.Node]] = {}
        output = graph.output_node()
        for node in graph.nodes:
            if node is not output:
                for argument in argument_nodes(node):
                    self._reads.setdefault(root(argument), []).append(node)
        #: How often memory is read at the end: by results, and as new contents of inputs.
        self._late = collections.Counter(root(value) for value in output_values(graph) if isinstance(value, fx.Node))
        self._late.update(root(value) for _, value in updates)

    def allow(self, chain: _Chain) -> bool:
        """Whether nothing reads memory that a step overwrites, after that step or in it."""
        contents = chain.target
        for step in chain.steps:
            order = self._order[step.operation]
            reads = self._reads.get(contents, [])
            if self._late[contents] or reads.count(step.operation) != 1:
                return False
            if any(self._order[reader] >= order for reader in reads if reader is not step.operation):
                return False
            contents = step.value
        # A result has memory of its own, and so have the new contents of another input.
        return self._late[contents] == 1


def _run_in_place(graph: fx.Graph, chains: Iterable[_Chain]) -> None:
    """Replace the steps' operations by their overloads that write, and uses of their values by the inputs."""
    memory: dict[fx.Node, fx.Node] = {}
    overloads: dict[fx.Node, torch._ops.OpOverload] = {}
    for chain in chains:
        for step in chain.steps:
            memory[step.value] = chain.target
            overloads[step.operation] = step.overload
    for operation, overload in overloads.items():
        first: Any = operation.args[0]
        written = [memory.get(x, x) for x in first] if isinstance(first, (list, tuple)) else memory.get(first, first)  # pyright: ignore
        with graph.inserting_before(operation):
            call = graph.call_function(overload, (written, *operation.args[1:]), operation.kwargs)
        call.meta = dict(operation.meta)
        if isinstance(written, list):
            call.meta["spec"] = None
    for value, target in memory.items():
        value.replace_all_uses_with(target)
    for operation in reversed(overloads):
        for selection in list(operation.users):
            graph.erase_node(selection)
        graph.erase_node(operation)
