"""Clearing a reference from one object to another: a variable, an attribute or an entry is deleted."""

# Objects are of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import queue
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from pygraph.guards import memos
from pygraph.guards.attributes import attributes_of
from pygraph.guards.storage import delete_keys, holds_symbol, stored_items
from pygraph.tracing.references import Reference, fields_of, owner_of


def clear_reference(reference: Reference) -> bool:
    """Clear a reference, and nothing beside it; False if that is not possible, or not known how."""
    referrer, referent = reference
    if isinstance(referrer, memos.Memo):
        return memos.forget(referrer, referent)
    for kind, clear in _CLEARING:
        if isinstance(referrer, kind):
            return clear(referrer, referent)
    return _clear_in_object(referrer, referent)


def _clear_in_dict(referrer: dict[Any, Any], referent: Any) -> bool:
    owner = owner_of(referrer)
    keys = [key for key, value in stored_items(referrer) if value is referent or key is referent]
    if isinstance(owner, type):
        for key in keys:
            type.__delattr__(owner, key)  # which invalidates the interpreter's caches
        return True
    if owner is None and _is_standard_librarys(referrer):
        return False
    memo = memos.memo_of(referrer) if any(map(holds_symbol, keys)) else None
    if memo is not None:
        forgotten = [memos.forget(memo, key) for key in keys]
        return all(forgotten)
    delete_keys(referrer, keys)
    return True


def _is_standard_librarys(container: Any) -> bool:
    """Whether a container is a variable of the standard library, as its table of threads; that of modules is not."""
    modules = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in sys.stdlib_module_names
    ]
    found = any(value is container for module in modules for value in list(vars(module).values()))
    return found and container is not sys.modules


def _clear_in_list(referrer: list[Any], referent: Any) -> bool:
    for index in reversed([index for index, value in enumerate(list.__iter__(referrer)) if value is referent]):
        list.__delitem__(referrer, index)
    return True


def _clear_in_deque(referrer: collections.deque[Any], referent: Any) -> bool:
    others = [value for value in collections.deque.__iter__(referrer) if value is not referent]
    collections.deque.clear(referrer)
    collections.deque.extend(referrer, others)
    return True


def _clear_in_set(referrer: set[Any], referent: Any) -> bool:
    set.discard(referrer, referent)
    return True


def _clear_in_cell(referrer: types.CellType, referent: Any) -> bool:
    del referent
    del referrer.cell_contents
    return True


def _clear_in_queue(referrer: queue.SimpleQueue[Any], referent: Any) -> bool:
    values: list[Any] = []
    while not referrer.empty():
        values.append(referrer.get_nowait())
    for value in values:
        if value is not referent:
            referrer.put(value)
    return True


def _clear_in_error(referrer: BaseException, referent: Any) -> bool:
    if referrer.args is referent or any(value is referent for value in referrer.args):
        referrer.args = ()
    elif referrer.__traceback__ is referent:
        referrer.__traceback__ = None
    elif referrer.__context__ is referent or referrer.__cause__ is referent:
        referrer.__context__ = referrer.__cause__ = None
    else:
        return _clear_in_object(referrer, referent)
    return True


def _clear_in_tensor(referrer: torch.Tensor, referent: Any) -> bool:
    if referrer._backward_hooks is referent:
        referrer._backward_hooks = None
        return True
    return _clear_in_object(referrer, referent)


def _clear_in_object(referrer: Any, referent: Any) -> bool:
    fields = [name for name, value in fields_of(referrer) if value is referent]
    state = attributes_of(referrer)
    for name in fields:
        if state is not None and name in state:
            del state[name]
        else:
            object.__delattr__(referrer, name)
    return bool(fields)


_CLEARING: tuple[tuple[type, Callable[[Any, Any], bool]], ...] = (
    (dict, _clear_in_dict),
    (list, _clear_in_list),
    (collections.deque, _clear_in_deque),
    (set, _clear_in_set),
    (types.CellType, _clear_in_cell),
    (queue.SimpleQueue, _clear_in_queue),
    (BaseException, _clear_in_error),
    (torch.Tensor, _clear_in_tensor),
)
