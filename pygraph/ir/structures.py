"""Structures of arguments: made again of leaves, and differences between two, by their paths."""

# A structure's context is whatever a container's class says it is.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from pygraph.ir.paths import ANSWERS
from pygraph.ir.value_keys import context_key

_DEEPEST = 64
"""Levels of a structure that is made by code; Python reads 200 brackets inside of each other."""
_MOST = 4
"""Differences that a text has."""


def unflatten(leaves: Iterable[Any], structure: pytree.TreeSpec) -> Any:
    """`tree_unflatten` that makes a ``torch.Size`` of one, for which torch makes a tuple.

    >>> leaves, structure = pytree.tree_flatten({"a": torch.Size([2, 3])})
    >>> unflatten(leaves, structure)
    {'a': torch.Size([2, 3])}
    """
    if not _has_sizes(structure):
        return pytree.tree_unflatten(leaves, structure)
    return _unflatten(iter(leaves), structure)


def maker(structure: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """A function that makes such a structure of its leaves; of tuples, lists and dicts it is made once, as code.

    >>> make = maker(pytree.tree_structure((1, {"a": [2, 3]})))
    >>> make([5, 6, 7])
    (5, {'a': [6, 7]})
    """
    scope: dict[str, Any] = {}
    text = _made_of(structure, iter(range(structure.num_leaves)), scope)
    if text is None:
        if _has_sizes(structure):
            return lambda leaves: _unflatten(iter(leaves), structure)
        return functools.partial(pytree.tree_unflatten, treespec=structure)
    return eval(f"lambda leaves: {text}", scope)  # the text is made of brackets, positions and names only


def _made_of(structure: pytree.TreeSpec, positions: Iterator[int], scope: dict[str, Any], depth: int = 0) -> str | None:
    """An expression that makes a structure; None if that takes more than a few brackets."""
    if structure.is_leaf():
        return f"leaves[{next(positions)}]"
    if depth == _DEEPEST:
        return None
    parts = [_made_of(child, positions, scope, depth + 1) for child in structure.children()]
    if None in parts or structure.type not in (tuple, list, dict):
        return None
    if structure.type is dict:
        names = [f"k{len(scope) + number}" for number in range(len(parts))]
        scope.update(zip(names, structure.context, strict=True))
        return "{" + "".join(f"{key}: {part}, " for key, part in zip(names, parts, strict=True)) + "}"
    items = "".join(f"{part}, " for part in parts)
    return f"({items})" if structure.type is tuple else f"[{items}]"


def _has_sizes(structure: pytree.TreeSpec) -> bool:
    return structure.type is torch.Size or any(map(_has_sizes, structure.children()))


def _unflatten(leaves: Iterator[Any], structure: pytree.TreeSpec) -> Any:
    if structure.is_leaf():
        return next(leaves)
    parts = [_unflatten(leaves, child) for child in structure.children()]
    if structure.type is torch.Size:
        return torch.Size(parts)
    return pytree.SUPPORTED_NODES[structure.type].unflatten_fn(parts, structure.context)


def structure_differences(found: pytree.TreeSpec, expected: pytree.TreeSpec) -> str:
    """List what is missing in a structure of ``(args, kwargs)``, is unexpected there, or of another class.

    >>> _, expected = pytree.tree_flatten((({"a": 1, "b": 2},), {}))
    >>> _, found = pytree.tree_flatten((({"a": (1,), "c": 2}, 3), {}))
    >>> structure_differences(found, expected)
    "args[0]['a'] is a tuple, not a leaf; args[0]['c'] is unexpected; args[0]['b'] is missing; args[1] is unexpected"
    """
    both = zip(("args", "kwargs"), found.children(), expected.children(), strict=True)
    lines = [line for name, one, other in both for line in _differences(name, one, other)]
    more = len(lines) - _MOST
    return "; ".join([*lines[:_MOST], *([f"and {more} more"] if more > 0 else [])])


def _differences(path: str, found: pytree.TreeSpec, expected: pytree.TreeSpec) -> Iterator[str]:
    if found == expected:
        return
    if found.type is not expected.type:
        yield f"{path} is {_name(found)}, not {_name(expected)}"
        return
    theirs, ours = _parts(found), _parts(expected)
    for key, part in theirs.items():
        if key in ours:
            yield from _differences(f"{path}[{key!r}]", part, ours[key])
        else:
            yield f"{path}[{key!r}] is unexpected"
    yield from (f"{path}[{key!r}] is missing" for key in ours if key not in theirs)
    if theirs == ours:
        order = list(theirs) != list(ours)
        yield f"{path} has its keys in another order" if order else f"{path} is of another class, or kind of it"


def _parts(structure: pytree.TreeSpec) -> dict[Hashable, pytree.TreeSpec]:
    """The parts of a container, by key in a dict, else by position."""
    keys = range(structure.num_children)
    if structure.type in (dict, OrderedDict):
        keys = structure.context
    elif structure.type is defaultdict:
        _, keys = structure.context
    return dict(zip(keys, structure.children(), strict=True))


class Container(NamedTuple):
    """A container in a structure, in texts.

    Attributes:
        name: Its class.
        keys: Those of a dict; of another one, its positions.
        is_keyed: Whether it is a dict.
        kind: A hash of its class and of what it says of itself, as a dict of its keys.
    """

    name: str
    keys: tuple[str, ...]
    is_keyed: bool
    kind: int


def containers_of(structure: pytree.TreeSpec, text: Callable[[object], str] = repr) -> dict[str, Container]:
    """The containers in a structure of ``(args, kwargs)`` by path, each before those in it, without decisions.

    Args:
        structure: The structure.
        text: The text of a key.

    >>> _, structure = pytree.tree_flatten((({"a": 1, "b": (2, 3)},), {}))
    >>> for path, container in containers_of(structure).items():
    ...     print(path, container.name, *container.keys)
    args tuple 0
    args[0] dict 'a' 'b'
    args[0]['b'] tuple 0 1
    kwargs dict
    """
    both = zip(("args", "kwargs"), structure.children(), strict=True)
    return {path: container for name, part in both for path, container in _containers(name, part, text)}


def _containers(
    path: str, structure: pytree.TreeSpec, text: Callable[[object], str]
) -> Iterator[tuple[str, Container]]:
    if structure.is_leaf():
        return
    all_parts = _parts(structure)
    parts = [(text(key), part) for key, part in all_parts.items() if not (type(key) is str and key == ANSWERS)]
    is_keyed = structure.type in (dict, OrderedDict, defaultdict)
    kind = hash((structure.type, None if ANSWERS in all_parts else context_key(structure)))
    yield path, Container(structure.type.__name__, tuple(key for key, _ in parts), is_keyed, kind)
    for key, part in parts:
        yield from _containers(f"{path}[{key}]", part, text)


def _name(structure: pytree.TreeSpec) -> str:
    return "a leaf" if structure.is_leaf() else f"a {structure.type.__name__}"
