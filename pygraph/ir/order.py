"""The order in which a function calls for its operations, by number: nodes are moved later, and others inserted."""

from __future__ import annotations

from torch import fx


def note_order(graph: fx.Graph) -> None:
    """Number the nodes in the order in which the function calls for them, unless an earlier pass has done so."""
    if all(node.meta.get("order") is None for node in graph.nodes):
        number_nodes(graph)


def number_nodes(graph: fx.Graph) -> None:
    """Number the nodes as they stand, whatever numbers they have."""
    for order, node in enumerate(graph.nodes):
        node.meta["order"] = order
