"""Dicts, lists and cells as they are stored in memory, whatever a derived class makes of reading and writing.

A class may load modules when an item is read (transformers' registries), add what is missing (`defaultdict`), or take
arguments of its own where a copy is made. Guards and snapshots must not run any of it.
"""

# Containers hold items of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
import gc
import types
from collections.abc import Collection
from typing import Any

import torch

_MISSING: Any = object()


def stored_length(container: Any) -> int:
    """How many items a dict or a list holds; of any other container its ``len``."""
    return _kind(container).__len__(container)


def stored_item(container: Any, key: Any) -> Any:
    """The value that a dict or a list holds under a key; any other container is asked by ``container[key]``.

    Raises:
        LookupError: Nothing is stored there.
    """
    if not isinstance(container, dict):
        return _kind(container).__getitem__(container, key)
    value = dict.get(container, key, _MISSING)
    if value is _MISSING:
        raise KeyError(key)
    return value


def stored_items(container: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a dict or of a list, in order."""
    if isinstance(container, dict):
        return list(_kind(container).items(container))
    return list(enumerate(list.__iter__(container)))


def stored_copy(container: Any) -> Any:
    """A dict or a list with the same items, of no derived class."""
    return dict(stored_items(container)) if isinstance(container, dict) else list(list.__iter__(container))


def store(container: Any, items: Any) -> None:
    """Replace the items of a dict or a list by those of another one."""
    if isinstance(container, dict):
        kind = _kind(container)
        kind.clear(container)
        for key, value in items.items():
            kind.__setitem__(container, key, value)
    else:
        list.__setitem__(container, slice(None), items)


def store_item(container: Any, key: Any, value: Any) -> None:
    """Store a value in a dict or a list under a key."""
    _kind(container).__setitem__(container, key, value)


def delete_item(container: Any, key: Any) -> None:
    """Remove a key from a dict, or an index from a list."""
    _kind(container).__delitem__(container, key)


def delete_keys(container: dict[Any, Any], keys: Collection[Any]) -> None:
    """Remove keys, and all others that hold a symbol of a trace: what that is equal to, nobody knows any more."""
    kind, wanted = _kind(container), set(map(id, keys))
    found = [key for key in kind.keys(container) if id(key) in wanted or holds_symbol(key)]
    if not any(map(holds_symbol, found)) or kind is not dict:
        for key in found:
            kind.__delitem__(container, key)
        return
    rest, others = set(map(id, found)), list[tuple[Any, Any]]()
    while rest:  # by identity, as no other way to remove a key is without a comparison
        key, value = dict.popitem(container)
        if id(key) in rest:
            rest.discard(id(key))
        else:
            others.append((key, value))
    for key, value in reversed(others):
        dict.__setitem__(container, key, value)


def holds_symbol(key: Any) -> bool:
    """Whether a key is a symbol of a trace, or a tuple with one."""
    if issubclass(type(key), tuple):
        return any(map(holds_symbol, tuple.__iter__(key)))
    return issubclass(type(key), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_derived(container: Any) -> bool:
    """Whether a dict or a list may do something of its own where it is read."""
    return isinstance(container, (dict, list)) and type(container) not in (dict, list)


def holds_the_very(container: Any, before: Any) -> bool:
    """Whether a dict or a list holds the very objects that a copy of it holds, under the very keys and in order."""
    if stored_length(container) != len(before):
        return False
    if not isinstance(before, dict):
        return all(a is b for a, b in zip(list.__iter__(container), before, strict=True))
    return all(a is b and x is y for (a, x), (b, y) in zip(stored_items(container), before.items(), strict=True))


def is_unchanged(container: Any, before: Any) -> bool:
    """Whether a dict or a list holds the very objects that a copy of it holds, in order and under keys that are equal.

    A trace may have put a key again for one that is equal, as a number of its own.
    """
    if holds_the_very(container, before):
        return True
    return isinstance(before, dict) and not changed_keys(container, before) and is_in_order(container, before)


def is_in_order(container: Any, before: dict[Any, Any]) -> bool:
    """Whether a dict has the keys that a copy of it has first, as far as they are there, and new ones last."""
    places = {key: place for place, (key, _) in enumerate(stored_items(container))}
    found = [places[key] for key in before if key in places]
    return found == list(range(len(found)))


def changed_keys(container: Any, before: dict[Any, Any]) -> list[Any]:
    """The keys under which a dict holds another object than a copy of it, or one of both holds nothing."""
    now = stored_copy(container)
    return [key for key in before | now if now.get(key, _MISSING) is not before.get(key, _MISSING)]


def stored_in_cell(cell: types.CellType) -> Any:
    """The value of a variable that a function closes over; None if none has been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def underlying(container: Any) -> Any:
    """The dict behind a read-only view of one, which can be watched; otherwise the container itself."""
    if isinstance(container, types.MappingProxyType):
        behind = gc.get_referents(container)
        if len(behind) == 1 and isinstance(behind[0], dict):
            return behind[0]
    return container


def _kind(container: Any) -> Any:
    # An ordered dict written in C keeps a list of its keys beside the dict, which dict's own methods do not know of.
    for kind in (collections.OrderedDict, dict, list):
        if isinstance(container, kind):
            return kind
    return type(container)
