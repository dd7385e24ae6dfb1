"""References from one object to another: whose they are, and what users call them."""

# Objects are of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pygraph.guards import memos
from pygraph.guards.attributes import attributes_of, slots_of
from pygraph.guards.packages import is_installed
from pygraph.guards.storage import stored_items, underlying
from pygraph.guards.thread_state import items_in_thread
from pygraph.ir.constants import IMMUTABLE
from pygraph.process.collection import objects_of, referrers_of

# The number of referrers that are followed from an object to one with a name, and to one that has an owner.
_NAME_DISTANCE, _OWNER_DISTANCE = 4, 8

LIBRARIES = frozenset({"torch", "pygraph", "numpy", "triton"})
"""Packages whose references are left alone: they depend on them, and drop them in time."""

_INTERNAL = ("torch._", "torch.fx.")

_OF_DYNAMO = ("__compiled_fn_", "__resume_at_")
"""So begin the variables of the user's modules that Dynamo keeps its functions in: torch 2.11 and 2.13."""

_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class Reference(NamedTuple):
    """An object, and one that it refers to."""

    referrer: Any
    referent: Any


def packages_of(reference: Reference) -> frozenset[str]:
    """The installed packages to which the referrer belongs, as code that Dynamo has compiled belongs to torch.

    None, if it is an object of the user's.
    """
    if _is_dynamos(reference):
        return frozenset({"torch"})
    layer: list[Any] = [reference.referrer]
    seen = {id(reference), id(reference.referrer)}
    for _ in range(_OWNER_DISTANCE):
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


def _is_dynamos(reference: Reference) -> bool:
    """Whether a reference is a variable of a module that Dynamo has put there, perhaps in another thread."""
    referrer, referent = reference
    if type(referrer) is not dict or not isinstance(referent, types.FunctionType):
        return False
    return str(key_of(stored_items(referrer), referent)).startswith(_OF_DYNAMO)


def is_result(reference: Reference) -> bool:
    """Whether the referent is a result in the cache of a function (``functools.cache``)."""
    referrer, referent = reference
    if isinstance(referrer, memos.Memo):
        return referent is not memos.cache_of(referrer) and referent is not referrer.__dict__
    return type(referrer) is dict and isinstance(owner_of(referrer), memos.Memo)


def _is_tracers(value: Any) -> bool:
    """Whether an object is only looking: a `Reference`, a frame, or an object of pygraph."""
    return isinstance(value, (Reference, types.FrameType)) or type(value).__module__.startswith("pygraph.")


def _module_of(value: Any) -> str | None:
    """The module of a function or a class, or of an object's class; None for classes of Python and of libraries."""
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


def name_of(reference: Reference) -> str:
    """The name by which users know a reference: a variable, an attribute, an entry, a cache."""
    referrer, referent = reference
    if isinstance(referrer, memos.Memo):
        return _name_of_memo(referrer)
    if isinstance(referrer, dict):
        return _entry(referrer, key_of(stored_items(referrer), referent))
    if isinstance(referrer, (list, collections.deque, set)):
        return f"an item of {_name(referrer)}"
    if isinstance(referrer, types.CellType):
        return _variable(referrer)
    if isinstance(referrer, _GENERATORS):
        return f"the frame of {referrer.__qualname__}"
    if isinstance(referrer, types.FrameType):
        return f"{referrer.f_code.co_qualname}, which another thread runs"
    field = key_of(fields_of(referrer), referent)
    return _name(referrer) if field is None else f"{_name(referrer)}.{field}"


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


def _name(value: Any, distance: int = 0) -> str:
    """The name of an object: that of the variable or attribute whose value it is."""
    if isinstance(value, (types.FunctionType, type)):
        return value.__qualname__
    if distance < _NAME_DISTANCE:
        referrers = [r for r in referrers_of([value]) if isinstance(r, (dict, types.CellType))]
        found: list[str] = []
        for container in referrers:
            owner = owner_of(container) if isinstance(container, dict) else None
            key = None if owner is None or owner is value else key_of(stored_items(container), value)
            if key is not None and isinstance(owner, types.ModuleType):
                return f"{owner.__name__}.{key}"
            if key is not None:
                found.append(f"{_name(owner, distance + 1)}.{key}")
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
                variable = key_of(zip(function.__code__.co_freevars, closure, strict=True), cell)
                return f"{variable} of {function.__qualname__}"
    return "a closed-over variable"


def owner_of(container: dict[Any, Any]) -> Any:
    """The object whose variables or attributes a dict holds; None if it is nobody's."""
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


def key_of(items: Iterable[tuple[Any, Any]], value: Any) -> Any:
    """The key of a value among items; without a function that refers to the value, which would be one more referrer."""
    for key, item in items:
        if item is value:
            return key
    return None


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, in its dict and its slots; no code of its class is run."""
    yield from list((attributes_of(value) or {}).items())
    slots = slots_of(value)
    yield from {}.items() if slots is None else slots[0].items()
