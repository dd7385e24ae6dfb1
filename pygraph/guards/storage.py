"""Dicts and lists as they lie in memory, whatever a class derived from them makes of reading and writing.

A class may load modules when an item is read (transformers' registries), add what is missing (`defaultdict`), or take
arguments of its own where a copy is made. Guards and snapshots must not run any of it.
"""

# Containers hold items of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
from typing import Any

_MISSING: Any = object()


def stored_length(container: Any) -> int:
    """How many items a dict or a list holds; of any other container what `len` says."""
    return _kind(container).__len__(container)


def stored_item(container: Any, key: Any) -> Any:
    """What a dict or a list holds under a key; any other container is asked.

    Raises:
        LookupError: There is nothing.
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
    """Give a dict or a list the items of another one."""
    if isinstance(container, dict):
        kind = _kind(container)
        kind.clear(container)
        for key, value in items.items():
            kind.__setitem__(container, key, value)
    else:
        list.__setitem__(container, slice(None), items)


def store_item(container: Any, key: Any, value: Any) -> None:
    """Have a dict or a list hold a value under a key."""
    _kind(container).__setitem__(container, key, value)


def delete_item(container: Any, key: Any) -> None:
    """Have a dict hold nothing under a key any more."""
    _kind(container).__delitem__(container, key)


def is_derived(container: Any) -> bool:
    """Whether a dict or a list may do something of its own where it is read."""
    return isinstance(container, (dict, list)) and type(container) not in (dict, list)


def _kind(container: Any) -> Any:
    # An ordered dict written in C keeps a list of its keys beside the dict, which dict's own methods do not know of.
    for kind in (collections.OrderedDict, dict, list):
        if isinstance(container, kind):
            return kind
    return type(container)
