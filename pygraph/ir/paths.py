"""Paths of leaves in arguments and results, for containers of every class that pytree knows."""

# Containers hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils import _pytree as pytree


def flatten_with_path(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[pytree.KeyPath, Any]], pytree.TreeSpec]:
    """`tree_flatten_with_path`, also for classes registered without names of their items (diffusers' outputs).

    Args:
        tree: Any value.
        is_leaf: What is taken for a leaf though it has items.

    Returns:
        Paths and leaves, and the structure; where a class has no names, keys of a mapping, otherwise numbers.

    >>> class Pair:
    ...     def __init__(self, first, second):
    ...         self.first, self.second = first, second
    >>> pytree.register_pytree_node(Pair, lambda pair: ([pair.first, pair.second], None), lambda parts, _: Pair(*parts))
    >>> [(pytree.keystr(path), leaf) for path, leaf in flatten_with_path({"a": Pair(1, 2)})[0]]
    [("['a'][0]", 1), ("['a'][1]", 2)]
    """
    try:
        return pytree.tree_flatten_with_path(tree, is_leaf)
    except ValueError:
        # Of a class without names; any other error comes again.
        _, spec = pytree.tree_flatten(tree, is_leaf)
        return list(_paths((), tree, is_leaf)), spec


def _paths(path: pytree.KeyPath, tree: Any, is_leaf: Callable[[Any], bool] | None) -> Iterator[tuple[Any, Any]]:
    def is_part(value: Any) -> bool:
        return value is not tree

    parts, spec = pytree.tree_flatten(tree, is_part)
    if spec.is_leaf() or (is_leaf is not None and is_leaf(tree)):
        yield path, tree
        return
    try:
        keys: list[Any] = [key for (key,), _ in pytree.tree_flatten_with_path(tree, is_part)[0]]
    except ValueError:
        if isinstance(tree, Mapping) and len(tree) == len(parts):
            keys = [pytree.MappingKey(key) for key in tree]
        else:
            keys = [pytree.SequenceKey(index) for index in range(len(parts))]
    for key, part in zip(keys, parts, strict=True):
        yield from _paths((*path, key), part, is_leaf)


ANSWERS = "pygraph_answers"
"""The keyword argument with the answers to a call's questions about values on the device, which no user passes."""


def is_answer(path: pytree.KeyPath) -> bool:
    """Whether a key path is that of such an answer, also among the arguments of a function that takes state."""
    return any(isinstance(key, pytree.MappingKey) and key.key == ANSWERS for key in path)


def argument_path(path: pytree.KeyPath) -> str:
    """``args[0]['w']`` or ``kwargs['x']`` from a key path of ``(args, kwargs)``; ``decision 1`` of an answer."""
    entries: list[Any] = list(path)
    if len(entries) > 2 and isinstance(entries[1], pytree.MappingKey) and entries[1].key == ANSWERS:
        return f"decision {entries[2].idx + 1}"
    return ("args", "kwargs")[entries[0].idx] + pytree.keystr(path[1:])
