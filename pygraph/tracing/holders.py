"""What holds an object that is to go: how users would call the place, and how to empty it, and nothing beside it."""

# Holders and what they hold are of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import queue
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from pygraph.guards import memos
from pygraph.guards.attributes import attributes_of, slots_of
from pygraph.guards.packages import is_installed
from pygraph.guards.storage import delete_item, stored_items, underlying
from pygraph.guards.thread_state import items_in_thread
from pygraph.ir.constants import IMMUTABLE
from pygraph.process.collection import objects_of, referrers_of

# Names are looked for this many steps away from a place, and whose it is so many.
_FAR, _FARTHER = 4, 8

LIBRARIES = frozenset({"torch", "pygraph", "numpy", "triton"})
"""Packages from whose places nothing is taken: they depend on it, and forget it in time."""

_INTERNAL = ("torch._", "torch.fx.")

_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class Held(NamedTuple):
    """An object, and one that it refers to and that is to go."""

    holder: Any
    item: Any


# -- whose it is, and what it is called -----------------------------------------------------------------------------


def packages_of(held: Held) -> frozenset[str]:
    """The installed packages that have the object for their own ends, as torch has what Dynamo has compiled; empty if
    it is the user's.
    """
    layer: list[Any] = [held.holder]
    seen = {id(held), id(held.holder)}
    for _ in range(_FARTHER):
        modules = {module for value in layer if (module := _module_of(value)) is not None}
        if modules:
            are_packages = all(map(_belongs_to_package, modules))
            return frozenset(module.partition(".")[0] for module in modules if are_packages)
        above: list[Any] = []
        for referrer in referrers_of(layer):
            if id(referrer) not in seen and not _is_tracers(referrer):
                seen.add(id(referrer))
                above.append(referrer)
        layer = above
    return frozenset()


def is_result(held: Held) -> bool:
    """Whether an object is what a function has returned that remembers its results."""
    if isinstance(held.holder, memos.Memo):
        return held.item is not memos.cache_of(held.holder) and held.item is not held.holder.__dict__
    return type(held.holder) is dict and isinstance(owner_of(held.holder), memos.Memo)


def _is_tracers(value: Any) -> bool:
    """Whether an object is of those that look at others: what they refer to is not theirs."""
    return isinstance(value, (Held, types.FrameType)) or type(value).__module__.startswith("pygraph.")


def _module_of(value: Any) -> str | None:
    """The module that has defined a function or a class, or the class of an object; None if that says nothing."""
    if isinstance(value, (types.FunctionType, type, memos.Memo)):
        return value.__module__
    if isinstance(value, types.ModuleType):
        return value.__name__
    if type(value) is dict and isinstance(name := value.get("__name__"), str):
        module = sys.modules.get(name)
        return name if module is not None and vars(module) is value else None
    module = type(value).__module__
    is_plain = module.partition(".")[0] in (*sys.stdlib_module_names, *LIBRARIES)
    return None if is_plain and not module.startswith(_INTERNAL) else module


def _belongs_to_package(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES or is_installed(module)


def name_of(held: Held) -> str:
    """What users would call the place where a holder has something."""
    holder, item = held
    if isinstance(holder, memos.Memo):
        return _name_of_memo(holder)
    if isinstance(holder, dict):
        return _entry(holder, _key_of(stored_items(holder), item))
    if isinstance(holder, (list, collections.deque, set)):
        return f"an item of {_name(holder)}"
    if isinstance(holder, types.CellType):
        return _variable(holder)
    if isinstance(holder, _GENERATORS):
        return f"the frame of {holder.__qualname__}"
    if isinstance(holder, types.FrameType):
        return f"{holder.f_code.co_qualname}, which another thread runs"
    field = _key_of(_fields(holder), item)
    return _name(holder) if field is None else f"{_name(holder)}.{field}"


def _name_of_memo(memo: Any) -> str:
    return f"the functools cache of {memo.__qualname__}"


def _entry(container: dict[Any, Any], key: Any) -> str:
    """The name of an entry of a dict: a variable, an attribute, or an item."""
    owner = owner_of(container)
    if isinstance(owner, memos.Memo) and memos.cache_of(owner) is container:
        return _name_of_memo(owner)
    if isinstance(owner, types.ModuleType):
        return f"{owner.__name__}.{key}"
    if owner is not None:
        return f"{_name(owner)}.{key}"
    name = _name(container)
    return f"{name}[{key!r}]" if type(key) in IMMUTABLE and key is not None else f"an entry of {name}"


def _name(value: Any, far: int = 0) -> str:
    """The name of an object: by the variable or the attribute that it is the value of."""
    if isinstance(value, (types.FunctionType, type)):
        return value.__qualname__
    if far < _FAR:
        referrers = [r for r in referrers_of([value]) if isinstance(r, (dict, types.CellType))]
        found: list[str] = []
        for container in referrers:
            owner = owner_of(container) if isinstance(container, dict) else None
            key = None if owner is None or owner is value else _key_of(stored_items(container), value)
            if key is not None and isinstance(owner, types.ModuleType):
                return f"{owner.__name__}.{key}"
            if key is not None:
                found.append(f"{_name(owner, far + 1)}.{key}")
        if found:
            return found[0]
        for cell in referrers:
            if isinstance(cell, types.CellType):
                return _variable(cell)
    return f"a {type(value).__qualname__}"


def _variable(cell: types.CellType) -> str:
    """The name of a variable that functions close over."""
    for closure in referrers_of([cell]):
        for function in referrers_of([closure]) if isinstance(closure, tuple) else ():
            if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                variable = _key_of(zip(function.__code__.co_freevars, closure, strict=True), cell)
                return f"{variable} of {function.__qualname__}"
    return "a closed-over variable"


def owner_of(container: dict[Any, Any]) -> Any:
    """Whose variables or attributes lie in a dict; None if it is nobody's."""
    referrers = referrers_of([container])
    for referrer in sorted(referrers, key=lambda found: not isinstance(found, (types.ModuleType, type))):
        if isinstance(referrer, types.FunctionType):
            is_owner = referrer.__dict__ is container
        elif isinstance(referrer, type):
            is_owner = underlying(vars(referrer)) is container
        elif isinstance(referrer, memos.Memo):
            is_owner = referrer.__dict__ is container or memos.cache_of(referrer) is container
        else:
            is_owner = not isinstance(referrer, (dict, list, tuple)) and attributes_of(referrer) is container
        if is_owner:
            return referrer
    for value in objects_of(lambda kind: issubclass(kind, threading.local)):
        # A thread's values of a thread-local are in a dict that does not belong to the object.
        if items_in_thread(value) is container:
            return value
    return None


def _key_of(items: Iterable[tuple[Any, Any]], value: Any) -> Any:
    """The key of an object; without a function of its own, which would be one more that refers to it."""
    for key, item in items:
        if item is value:
            return key
    return None


# -- emptying -------------------------------------------------------------------------------------------------------


def take_out(held: Held) -> bool:
    """Empty the place where a holder has something; False if that is not possible, or not known how."""
    holder, item = held
    if isinstance(holder, memos.Memo):
        return memos.forget(holder, item)
    for kind, empty in _EMPTYING:
        if isinstance(holder, kind):
            return empty(holder, item)
    return _take_from_object(holder, item)


def _take_from_dict(holder: dict[Any, Any], item: Any) -> bool:
    owner = owner_of(holder)
    keys = [key for key, value in stored_items(holder) if value is item or key is item]
    if isinstance(owner, type):
        for key in keys:
            type.__delattr__(owner, key)  # which tells the interpreter's caches
        return True
    if owner is None and _is_interpreters(holder):
        return False
    for key in keys:
        delete_item(holder, key)
    return True


def _is_interpreters(container: Any) -> bool:
    """Whether a container is a variable of the standard library, as its table of threads; that of modules is not."""
    modules = [
        module for name, module in list(sys.modules.items()) if name.partition(".")[0] in sys.stdlib_module_names
    ]
    found = any(value is container for module in modules for value in list(vars(module).values()))
    return found and container is not sys.modules


def _take_from_list(holder: list[Any], item: Any) -> bool:
    for index in reversed([index for index, value in enumerate(list.__iter__(holder)) if value is item]):
        list.__delitem__(holder, index)
    return True


def _take_from_deque(holder: collections.deque[Any], item: Any) -> bool:
    kept = [value for value in collections.deque.__iter__(holder) if value is not item]
    collections.deque.clear(holder)
    collections.deque.extend(holder, kept)
    return True


def _take_from_set(holder: set[Any], item: Any) -> bool:
    set.discard(holder, item)
    return True


def _take_from_cell(holder: types.CellType, item: Any) -> bool:
    del item
    del holder.cell_contents
    return True


def _take_from_queue(holder: queue.SimpleQueue[Any], item: Any) -> bool:
    kept: list[Any] = []
    while not holder.empty():
        kept.append(holder.get_nowait())
    for value in kept:
        if value is not item:
            holder.put(value)
    return True


def _take_from_error(holder: BaseException, item: Any) -> bool:
    if holder.args is item or any(value is item for value in holder.args):
        holder.args = ()
    elif holder.__traceback__ is item:
        holder.__traceback__ = None
    elif holder.__context__ is item or holder.__cause__ is item:
        holder.__context__ = holder.__cause__ = None
    else:
        return _take_from_object(holder, item)
    return True


def _take_from_tensor(holder: torch.Tensor, item: Any) -> bool:
    if holder._backward_hooks is item:
        holder._backward_hooks = None
        return True
    return _take_from_object(holder, item)


def _take_from_object(holder: Any, item: Any) -> bool:
    fields = [name for name, value in _fields(holder) if value is item]
    state = attributes_of(holder)
    for name in fields:
        if state is not None and name in state:
            del state[name]
        else:
            object.__delattr__(holder, name)
    return bool(fields)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """An object's attributes, in its dict and in its slots; nothing of its class is run for it."""
    yield from list((attributes_of(value) or {}).items())
    slots = slots_of(value)
    yield from {}.items() if slots is None else slots[0].items()


_EMPTYING: tuple[tuple[type, Callable[[Any, Any], bool]], ...] = (
    (dict, _take_from_dict),
    (list, _take_from_list),
    (collections.deque, _take_from_deque),
    (set, _take_from_set),
    (types.CellType, _take_from_cell),
    (queue.SimpleQueue, _take_from_queue),
    (BaseException, _take_from_error),
    (torch.Tensor, _take_from_tensor),
)
