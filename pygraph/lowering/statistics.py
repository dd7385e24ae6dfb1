"""Running statistics of batch norm, updated in place as eager does it, by the operation that normalises."""

# torch has no public names for operator overloads. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import fx

from pygraph.ir.decisions import decisions_among
from pygraph.ir.effects import argument_nodes, root

aten = torch.ops.aten

_IN_PLACE = {
    aten._native_batch_norm_legit_functional.default: aten._native_batch_norm_legit.default,
    aten._batch_norm_with_update_functional.default: aten._batch_norm_with_update.default,
}
"""Operations that return new statistics after their results, and those that write them to the old ones."""

_STATISTICS = slice(3, 5)
"""Where these operations take the running mean and variance."""


def update_statistics(graph: fx.Graph, updated: Collection[fx.Node]) -> None:
    """Let batch norm write running statistics to the inputs that hold them, where nothing reads the old ones later.

    IR before::

        norm = aten._native_batch_norm_legit_functional.default(x, weight, bias, mean, var, True, 0.1, 1e-05)
        return (norm[3], norm[4],  # new contents of mean, var
                norm[0])

    IR after::

        norm = aten._native_batch_norm_legit.default(x, weight, bias, mean, var, True, 0.1, 1e-05)
        return (mean, var, norm[0])

    Args:
        graph: The graph, which is changed.
        updated: The placeholders whose memory has other contents at the end.
    """
    if decisions_among(graph.nodes):
        return  # nothing is updated before decisions are made, and these wait for draws that may depend on results
    order = {node: number for number, node in enumerate(graph.nodes)}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for argument in argument_nodes(node):
            readers.setdefault(root(argument), []).append(node)
    for node in list(graph.nodes):
        if node.target not in _IN_PLACE:
            continue
        old: Any = node.args[_STATISTICS]
        if all(
            one in updated
            and not one.meta["spec"].overlaps_itself
            and [reader for reader in readers[one] if order[reader] >= order[node]] == [node]
            for one in old
        ):
            _write(graph, node, old, readers)


def _write(graph: fx.Graph, node: fx.Node, old: tuple[fx.Node, fx.Node], readers: dict[fx.Node, list[fx.Node]]) -> None:
    """Replace one operation; whoever reads new statistics reads the inputs that have them now."""
    count = len(node.meta["spec"]) - len(old)
    with graph.inserting_before(node):
        call = graph.call_function(_IN_PLACE[node.target], node.args, node.kwargs)  # pyright: ignore[reportArgumentType]
    call.meta = {**node.meta, "spec": node.meta["spec"][:count]}
    for selection in list(node.users):
        index = cast(int, selection.args[1])
        assert selection.target is operator.getitem
        if index < count:
            selection.args = (call, index)
        else:
            memory = old[index - count]
            selection.replace_all_uses_with(memory)
            readers[memory] += readers.pop(selection, [])
            graph.erase_node(selection)
    graph.erase_node(node)
