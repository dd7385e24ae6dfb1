"""Classes of objects that are nothing but attributes, and items of a dict: such objects can be taken apart."""

# Attributes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pygraph.guards.attributes import attributes_of, dict_slot_of
from pygraph.guards.walk.code_names import looked_up
from pygraph.ir.value_keys import has_only_attributes

# Objects that are whole: they have other state, or others refer to them, as optimizers do to parameters.
_WHOLE = (
    torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler,
    torch.Generator, types.ModuleType,
)  # fmt: skip

# Libraries whose objects are whole, but for classes that are made for users' data.
_LIBRARIES = frozenset({"torch", "numpy", "pygraph", "triton"})

# The bit of a class's flags that says that it was made at run time (CPython 3.11 to 3.14).
_MADE_AT_RUN_TIME = 1 << 9

_BASES = (dict, types.SimpleNamespace)


@dataclasses.dataclass(frozen=True)
class Openable:
    """How objects of a class are read and made.

    Attributes:
        cls: The class.
        base: ``dict``, ``types.SimpleNamespace`` or ``object``.
        slots: The slots of the class and of those that it inherits from, by name.
        has_dict: Whether there are attributes besides.
    """

    cls: type
    base: type
    slots: dict[str, types.MemberDescriptorType]
    has_dict: bool

    def attributes(self, value: Any) -> tuple[tuple[str, ...], list[Any]]:
        """The names and values of an object's attributes; no code of its class is run."""
        found = self.read(value)
        return (*found,), [*found.values()]

    def read(self, value: Any) -> dict[str, Any]:
        """An object's attributes by name; no code of its class is run."""
        state = (attributes_of(value) or {}) if self.has_dict else {}
        if not self.slots:
            return state
        found: dict[str, Any] = {}
        for name, slot in self.slots.items():
            try:
                found[name] = slot.__get__(value)
            except AttributeError:
                continue  # there is nothing in it
        return {**found, **state}

    def new(self) -> Any:
        """An object without attributes, for which no ``__init__`` is run."""
        return self.base.__new__(self.cls)  # pyright: ignore[reportCallIssue]

    def put(self, value: Any, name: str, attribute: Any) -> None:
        """Store an attribute; no code of the class is run."""
        if name in self.slots:
            self.slots[name].__set__(value, attribute)
        else:
            _dict_of(value)[name] = attribute

    def remove(self, value: Any, name: str) -> None:
        """Delete an attribute; no code of the class is run."""
        if name in self.slots:
            self.slots[name].__delete__(value)
        else:
            del _dict_of(value)[name]


def _dict_of(value: Any) -> dict[str, Any]:
    state = attributes_of(value)
    assert state is not None
    return state


@functools.lru_cache(maxsize=4096)
def openable(cls: type) -> Openable | None:
    """How objects of a class are read and made; None if they are more than their attributes and items.

    >>> openable(types.SimpleNamespace).base.__name__, openable(torch.nn.Linear), openable(bytearray)
    ('SimpleNamespace', None, None)
    """
    base = next((base for base in _BASES if issubclass(cls, base)), object)
    library = (cls.__module__ or "").partition(".")[0]
    if cls in (object, dict, type) or cls in pytree.SUPPORTED_NODES or library in _LIBRARIES:
        return None
    if issubclass(cls, (*_WHOLE, torch.Tensor, BaseException, enum.Enum, type)) or issubclass(cls, np.generic):
        return None
    if not all(one in (object, *_BASES) or one.__flags__ & _MADE_AT_RUN_TIME for one in cls.__mro__):
        return None
    if any(hasattr(cls, name) for name in ("__del__", "__next__", "__await__")) or cls.__new__ is not base.__new__:
        return None
    if cls.__reduce__ is not base.__reduce__ or cls.__reduce_ex__ is not base.__reduce_ex__:
        return None
    if library in _MODULES_OF_C or not has_only_attributes(cls, base):
        return None
    slots = {
        name: slot
        for one in reversed(cls.__mro__)
        for name, slot in vars(one).items()
        if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
    }
    found = Openable(cls, base, slots, dict_slot_of(cls) is not None)
    try:
        found.new()
    except TypeError:  # of a class in C, or an abstract one
        return None
    return found


# Modules of the standard library whose objects are given by their identity: locks, queues, threads, contexts, files.
_MODULES_OF_C = frozenset(
    {"threading", "_thread", "queue", "asyncio", "multiprocessing", "concurrent", "contextlib", "contextvars", "io",
     "logging", "weakref", "socket", "subprocess", "tempfile", "random", "inspect", "functools", "unittest", "typing"}
)  # fmt: skip


def is_whole(value: Any) -> bool:
    """Whether an object that refers to this value is compared by identity, as the ``self`` of a trainer is."""
    return issubclass(type(value), _WHOLE) or type(value).__module__.partition(".")[0] in _MODULES_OF_C


def names_in_methods(cls: type) -> frozenset[str]:
    """The names that methods of a class look up, but for those that make, compare and print a dataclass.

    >>> class Sample:
    ...     def label(self):
    ...         return self.name
    >>> names_in_methods(Sample)
    frozenset({'name'})
    """
    names: set[str] = set()
    for base in cls.__mro__:
        is_made = "__dataclass_fields__" in vars(base)
        for name, value in vars(base).items():
            function = _FUNCTIONS[type(value)](value) if type(value) in _FUNCTIONS else value
            if isinstance(function, types.FunctionType) and not (is_made and name in _MADE_FOR_DATACLASSES):
                names |= looked_up(function.__code__)
    return frozenset(names)


_FUNCTIONS: dict[type, Callable[[Any], Any]] = {
    property: operator.attrgetter("fget"), functools.cached_property: operator.attrgetter("func"),
    staticmethod: operator.attrgetter("__func__"), classmethod: operator.attrgetter("__func__"),
}  # fmt: skip
_MADE_FOR_DATACLASSES = frozenset(vars(dataclasses.make_dataclass("_", ["a"], order=True)))


def holds_tensors(value: Any, depth: int = 2) -> bool:
    """Whether an object has tensors or NumPy arrays in its attributes, or in what lies in these."""
    kind = openable(type(value))
    if kind is None:
        return False
    parts = list(kind.read(value).values())
    leaves = pytree.tree_leaves([*parts, *(dict.values(value) if kind.base is dict else ())])
    return any(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in leaves) or (
        depth > 0 and any(holds_tensors(leaf, depth - 1) for leaf in leaves)
    )
