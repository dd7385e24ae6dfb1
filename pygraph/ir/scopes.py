"""The user's scopes: names of the ranges of torch's profiler and of NVTX in which an operation was called."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from torch import fx


def scopes_of(node: fx.Node) -> tuple[str, ...]:
    """The scopes in which a node's operation was called, from the outermost to the innermost."""
    return node.meta.get("scopes", ())


def came_from(node: fx.Node) -> dict[str, Any]:
    """The source line and the scopes of a node, as metadata for nodes that are made of it.

    With them, for an operation of a backward, the line of the operation that it is the derivative of.
    """
    return {name: node.meta.get(name) for name in ("source", "backward_of")} | {"scopes": scopes_of(node)}


def common_scopes(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The scopes that all these nodes are in.

    >>> graph = fx.Graph()
    >>> nodes = [graph.placeholder("a"), graph.placeholder("b")]
    >>> nodes[0].meta["scopes"], nodes[1].meta["scopes"] = ("step", "forward"), ("step", "backward")
    >>> common_scopes(nodes)
    ('step',)
    """
    levels = zip(*map(scopes_of, nodes), strict=False)
    return tuple(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
