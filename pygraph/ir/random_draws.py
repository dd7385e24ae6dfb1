"""Draws from random generators in graphs: which they are, and what orders them by data.

Eager draws in the order of the program. Inductor keeps that of data alone, so draws are chained: each takes the draw
before it, as an argument of its own (`pygraph::dropout_mask`, `pygraph::sample`) or through `pygraph::drawn_after`.
"""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from pygraph.ir.attention_states import draws_again
from pygraph.ir.drawn_after import DRAWN_AFTER
from pygraph.ir.dropout_masks import DROPOUT_MASK
from pygraph.ir.effects import argument_nodes, is_operation, is_random, is_selection, root, written_arguments
from pygraph.ir.samples import SAMPLE

LAST_IS_BEFORE = (DROPOUT_MASK, SAMPLE)
"""The operations that take the draw before as their last argument."""

# Attention's forwards, which Inductor calls as they are: by their first argument they can be ordered.
_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_cudnn_attention", "aten::_efficient_attention_forward",
        "aten::_flash_attention_forward",
    }
)  # fmt: skip


def is_draw(node: fx.Node) -> bool:
    """Whether a node draws from a generator, whose state is another one afterwards."""
    return is_random(node) and not draws_again(node)


def can_be_chained(node: fx.Node) -> bool:
    """Whether a draw can take the one before it, and Inductor calls it as it is."""
    target: Any = node.target
    if target in LAST_IS_BEFORE:
        return True
    return is_operation(node) and target._schema.name in _ATTENTION and target._overloadname == "default"


def draws_of(graph: fx.Graph) -> list[fx.Node]:
    """The draws of a graph, in order."""
    return [node for node in graph.nodes if is_draw(node)]


def values_taken(node: fx.Node, before: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes before a node that it depends on by data, also through memory that others have written.

    Args:
        node: The node.
        before: The nodes before it, in order.
    """
    arguments = argument_nodes(node)
    taken = {*arguments, *map(root, arguments)}
    for one in reversed(list(before)):
        if one in taken or any(root(written) in taken for written in written_arguments(one)):
            arguments = argument_nodes(one)
            taken.update((one, *arguments, *map(root, arguments)))
    return taken


def is_chained(draws: Iterable[fx.Node], graph: fx.Graph) -> bool:
    """Whether each of these draws takes the one before by an argument that is there for the order.

    Args:
        draws: The draws, in order.
        graph: The graph, which may write to memory.
    """
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    last: fx.Node | None = None
    for draw in draws:
        if last is not None:
            between = nodes[position[last] : position[draw]]
            links = [draw] if draw.target in LAST_IS_BEFORE else values_taken(draw, between)
            if not any(_linked(link) is last for link in links):
                return False
        last = draw
    return True


def _linked(node: fx.Node) -> fx.Node | None:
    """The draw that a node takes for the order alone; None if there is none."""
    if node.target in LAST_IS_BEFORE:
        after: Any = node.args[-1]
    else:
        after = node.args[1] if node.target is DRAWN_AFTER else None
    while isinstance(after, fx.Node) and is_selection(after):
        after = after.args[0]
    return after if isinstance(after, fx.Node) else None


def drop_links(graph: fx.Graph) -> None:
    """Drop what only orders draws, in a graph whose nodes run in its order.

    IR before::

        first = pygraph.dropout_mask.default([8], [1], torch.float32, device("cuda:0"), 0.1, None)
        query = pygraph.drawn_after.default(q, first)
        attention = aten._scaled_dot_product_flash_attention.default(query, k, v, 0.1)
        second = pygraph.dropout_mask.default([8], [1], torch.float32, device("cuda:0"), 0.1, attention[1])

    IR after::

        first = pygraph.dropout_mask.default([8], [1], torch.float32, device("cuda:0"), 0.1, None)
        attention = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.1)
        second = pygraph.dropout_mask.default([8], [1], torch.float32, device("cuda:0"), 0.1, None)

    Args:
        graph: The graph, which is changed.
    """
    for node in list(graph.nodes):
        if node.target is DRAWN_AFTER:
            node.replace_all_uses_with(node.args[0])  # pyright: ignore[reportArgumentType]
            graph.erase_node(node)
        elif node.target in LAST_IS_BEFORE:
            node.args = (*node.args[:-1], None)
