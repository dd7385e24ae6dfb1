"""Keys of the arguments of nodes: equal only where two nodes of one operation compute the same of equal values."""

# Arguments of nodes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx


class _KeylessError(Exception):
    """An argument has no key."""


def arguments_key(node: fx.Node, key_of: Callable[[fx.Node], Hashable]) -> tuple[Hashable, Hashable] | None:
    """The key of the arguments of a node, in order and by name.

    Args:
        node: The node.
        key_of: The key of another node's value, which it takes; None if that has none.

    Returns:
        The key; None if an argument has none, as a module has.
    """

    def key(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            found = key_of(value)
            if found is None:
                raise _KeylessError
            return found
        if isinstance(value, (list, tuple)):
            return tuple(map(key, value))
        if isinstance(value, dict):
            return tuple((name, key(one)) for name, one in value.items())
        if isinstance(value, slice):
            return "slice", *map(key, (value.start, value.stop, value.step))
        if not isinstance(value, _BY_TEXT):
            raise _KeylessError
        return type(value).__name__, repr(value)

    try:
        return key(node.args), key(node.kwargs)
    except _KeylessError:
        return None


_BY_TEXT = (
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
