"""The user's scopes: names of the ranges of torch's profiler and of NVTX in which an operation was called."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

Origin = Mapping[str, Any]
"""Where a node comes from, as its metadata: ``source``, ``scopes``, ``backward_of``."""


def scopes_of(node: fx.Node) -> tuple[str, ...]:
    """The scopes in which a node's operation was called, from the outermost to the innermost."""
    return node.meta.get("scopes", ())


def came_from(node: fx.Node) -> Origin:
    """The source line and the scopes of a node, as metadata for nodes that are made of it.

    With them, for an operation of a backward, the line of the operation that it is the derivative of.
    """
    return {name: node.meta.get(name) for name in ("source", "backward_of")} | {"scopes": scopes_of(node)}


def joined(origins: Sequence[Origin]) -> Origin:
    """The origin of what computes several nodes at once: the line of the first, and the scopes that all are in.

    >>> first = {"source": "train.py:3", "scopes": ("step", "forward"), "backward_of": None}
    >>> joined([first, {"source": "train.py:4", "scopes": ("step", "loss"), "backward_of": None}])
    {'source': 'train.py:3', 'scopes': ('step',), 'backward_of': None}
    """
    if not origins:
        return {"source": None}
    levels = zip(*(origin.get("scopes", ()) for origin in origins), strict=False)
    common = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    return {**origins[0], "scopes": tuple(level[0] for level in common)}
