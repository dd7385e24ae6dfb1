"""Rules for containers: dicts and lists, sets, tuples and deques, NumPy arrays, and the dicts of objects."""

# Items are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
import enum
import gc
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from pygraph.guards.attributes import attributes_of
from pygraph.guards.contents import Contents, contents_of, factory_of, length_of
from pygraph.guards.opened import Opened
from pygraph.guards.report_names import key_name
from pygraph.guards.storage import stored_items, stored_length
from pygraph.guards.walk.state import Walk
from pygraph.ir.constants import IMMUTABLE

#: A container with more entries than this (a vocabulary) is guarded by identity and length only.
LARGE = 2000

#: Keys that have no state of the user's, or are reached otherwise.
_KEYS = (*IMMUTABLE, torch.Tensor, type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


def walk_container(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Guard and snapshot a dict or list, and walk its items."""
    kind = type(value)
    walk.copy_container(name, value)
    length = stored_length(value)
    walk.guards.lengths.append((value, length))
    if length > LARGE or not walk.may_go_deeper(name, depth):
        return
    if issubclass(kind, dict):
        walk.guards.key_orders[id(value)] = keys = tuple(dict.__iter__(value))
        for key in keys:
            if not isinstance(key, _KEYS):
                walk.visit(f"a key of {name}", key, depth + 1)
    if issubclass(kind, collections.defaultdict):
        walk.guard_contents(f"{name}.default_factory", factory_of(value))
        walk.visit(f"{name}.default_factory", value.default_factory, depth)
    if issubclass(kind, collections.OrderedDict) and length > 1:  # which keeps an order of its own
        walk.guards.add_contents(Contents(lambda: list(collections.OrderedDict.__iter__(value))))
    for key, item in stored_items(value):
        walk.guards.entries.append((value, key, item))
        walk.visit(f"{name}[{key_name(key, walk.names)}]", item, depth + 1)


def walk_items(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Guard and snapshot a container of another kind, and walk its items."""
    kind = type(value)
    contents = contents_of(value, walk.memory)
    if contents is not None:
        walk.memory -= value.nbytes if issubclass(kind, np.ndarray) else 0
        large = issubclass(kind, (set, collections.deque)) and len(value) > LARGE
        walk.guard_contents(name, contents, length_of(value) if large else contents)
    items: Iterable[Any] = ()
    if issubclass(kind, (tuple, set, frozenset, collections.deque)) and len(value) <= LARGE:
        items = list(value)
    elif issubclass(kind, np.ndarray) and value.dtype == object and value.size <= LARGE:
        items = value.ravel().tolist()
    for index, item in enumerate(items):
        walk.visit(f"{name}[{index}]", item, depth + 1)


def walk_opened(walk: Walk, name: str, opened: Opened, depth: int) -> None:
    """Walk the leaves of an argument that was taken apart."""
    for path, value in zip(opened.layout.paths, opened.values, strict=True):
        walk.visit(name + path, value, depth + 1)


def walk_attributes(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Guard and snapshot the attributes in an object's dict, where there are any, and walk them."""
    state = attributes_of(value)
    if state is None:
        return
    walk.guards.attributes.add(name, value, state)
    if state:
        walk_container(walk, name, state, depth)
    else:
        walk.copy_container(name, state)
        walk.guards.lengths.append((state, 0))


def walk_view(walk: Walk, name: str, value: Any, depth: int) -> None:
    """Walk the dict behind a view of it, which Python's collector knows."""
    for behind in gc.get_referents(value):
        walk.visit(name, behind, depth)
