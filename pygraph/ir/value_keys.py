"""Keys of values: equal only where all that code can read of two values is equal, whatever their classes' ``==`` says.

Numbers, texts, enumerations, containers of the standard library and frozen dataclasses are compared by what is in them.
Any other object is equal to itself alone: an ``==`` that a class defines may leave out what a function reads.
"""

# Values are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import pathlib
import re
import struct
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

SIMPLE = frozenset(
    {
        int, bool, str, bytes, type(None), type(...), type(NotImplemented),
        torch.dtype, torch.device, torch.layout, torch.memory_format,
    }
)  # fmt: skip
"""Classes of which ``==`` compares all that there is, and whose objects last."""

_POINTER = struct.calcsize("P")

# Values in values are followed this deep.
_DEEP = 8

# Weak references to CUDA's streams and events dangle once these are gone (seen with torch 2.11): looking at one, or
# dropping it, is a use of freed memory (https://github.com/pytorch/pytorch/pull/183403).
_WITHOUT_WEAK_REFERENCES = (torch.Stream, torch.Event)


class Identity:
    """The key of an object that is equal to no other. The object is not kept alive, if its class allows that.

    Once it is gone, the key is equal to itself alone, also if another object gets the same address.

    Args:
        value: The object.

    Attributes:
        kind: Its class.
    """

    __slots__ = ("_hash", "_value", "kind")

    def __init__(self, value: object) -> None:
        self.kind, self._hash = type(value), id(value)
        self._value: Callable[[], object] = lambda: value
        if not isinstance(value, _WITHOUT_WEAK_REFERENCES):
            with contextlib.suppress(TypeError):  # of a class without weak references
                self._value = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not Identity:
            return False
        mine = self._value()
        return mine is not None and mine is other._value()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        value = self._value()
        return f"a {self.kind.__name__}" if value is None else repr(value)


class Equal:
    """The key of an object that is equal to those that its class says it is equal to.

    Args:
        value: The object.
    """

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if type(other) is not Equal or type(self._value) is not type(other._value):
            return False
        return self._value is other._value or bool(self._value == other._value)

    def __hash__(self) -> int:
        try:
            return hash(self._value)
        except TypeError:
            return hash(type(self._value))

    def __repr__(self) -> str:
        return repr(self._value)


class Parts(NamedTuple):
    """The key of a value that is nothing but its parts: an item of a container, or an attribute, each.

    Attributes:
        kind: Its class.
        names: The names of its attributes, which are the last parts.
        keys: The keys of its parts.
    """

    kind: type
    names: tuple[str, ...]
    keys: tuple[Hashable, ...]

    def __repr__(self) -> str:
        items = len(self.keys) - len(self.names)
        shown = [*map(_text, self.keys[:items]), *map(_named, self.names, self.keys[items:])]
        return f"{self.kind.__name__}({', '.join(shown)})"


def _named(name: str, key: Hashable) -> str:
    return f"{name}={_text(key)}"


def _text(key: Hashable) -> str:
    if type(key) is tuple and len(key) == 2:
        kind, value = key
        return value if isinstance(value, str) and kind is not str else repr(value)
    return repr(key)


def value_key(value: object, other: Callable[[object], Hashable] = Identity, depth: int = _DEEP) -> Hashable:
    """A key that is equal for values of which all that can be read is equal, and changes when they do.

    Args:
        value: Any value.
        other: Makes the key of an object that is not known to be only what its parts are.
        depth: How deep its parts are followed.

    Returns:
        The class with the value or a text of it, `Parts`, or what ``other`` gives.

    >>> value_key(1) == value_key(1.0), value_key(0.0) == value_key(-0.0), value_key((1, "a")) == value_key((1, "a"))
    (False, False, True)
    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     name: str
    ...     scale: float = dataclasses.field(default=1.0, compare=False)
    >>> Config("a") == Config("a", 2.0), value_key(Config("a")) == value_key(Config("a", 2.0))
    (True, False)
    >>> value_key(Config("a", 2.0))
    Config(name='a', scale=2.0)
    """
    kind = type(value)
    if kind in SIMPLE or kind in _COMPARED:
        return (kind, value)
    text = _TEXTS.get(kind)
    if text is not None:
        return (kind, text(value))
    if isinstance(value, np.generic):
        return other(value) if value.dtype.hasobject else (kind, _numpy_text(value))
    if depth == 0:
        return other(value)
    items = _ITEMS.get(kind)
    if items is not None:
        return Parts(kind, (), tuple(value_key(item, other, depth - 1) for item in items(value)))
    if kind is types.MethodType:
        bound: Any = value
        return Parts(kind, (), (Identity(bound.__func__), Identity(bound.__self__)))
    if issubclass(kind, enum.Enum):
        return (kind, value) if _compares_as_a_builtin(kind) else other(value)
    base = _base_of(kind)
    if base is None:
        return other(value)
    attributes = attributes_of(value)
    own = [] if base is object else [_BASES[base](value)]
    return Parts(
        kind, tuple(attributes), tuple(value_key(part, other, depth - 1) for part in [*own, *attributes.values()])
    )


def module_key(module: torch.nn.Module, depth: int = _DEEP) -> Hashable:
    """A key that is equal for modules of one class that hold the same: numbers, texts, and the very same objects.

    Modules in it are told in this way, too.

    Args:
        module: The module.
        depth: How deep modules in modules are followed.

    >>> from torch import nn
    >>> module_key(nn.MSELoss()) == module_key(nn.MSELoss()), module_key(nn.L1Loss()) == module_key(nn.MSELoss())
    (True, False)
    >>> module_key(nn.Linear(1, 1)) == module_key(nn.Linear(1, 1))
    False
    """
    kind = type(module)
    if depth == 0 or not has_only_attributes(kind):
        return Identity(module)
    inner, attributes = functools.partial(_key_in_module, depth=depth - 1), attributes_of(module)
    return Parts(kind, tuple(attributes), tuple([value_key(value, inner) for value in attributes.values()]))


def _key_in_module(value: object, depth: int) -> Hashable:
    return module_key(value, depth) if isinstance(value, torch.nn.Module) else Identity(value)


def form(key: Hashable) -> Hashable:
    """A key with the classes of objects in the place of these objects."""
    if type(key) is Identity:
        return key.kind
    if type(key) is Parts:
        formed = tuple(map(form, key.keys))
        return key if formed == key.keys else key._replace(keys=formed)
    return key


def has_objects_by_value(key: Hashable) -> bool:
    """Whether part of a key stands for any object with the same attributes, of a class that has some."""
    if type(key) is Parts:
        lasts = key.kind in _ITEMS or key.kind is types.MethodType
        return not lasts or any(map(has_objects_by_value, key.keys))
    return type(key) is tuple and any(map(has_objects_by_value, key))


def structure_key(spec: pytree.TreeSpec) -> Hashable:
    """A key of a structure, equal only for those with the same classes of containers and the same keys of dicts.

    What else containers of users' classes say of themselves is compared by ``==``, as their registration promises.
    """
    if spec.type is None:
        return None
    return (spec.type, context_key(spec), *map(structure_key, spec.children()))


def dict_keys(spec: pytree.TreeSpec) -> Iterable[Any]:
    """The keys of all dicts in a structure."""
    if spec.type is collections.defaultdict:
        yield from spec.context[1]
    elif spec.type in _DICTS:
        yield from spec.context
    for child in spec.children():
        yield from dict_keys(child)


def context_key(spec: pytree.TreeSpec) -> Hashable:
    """A key of what a container says of itself besides its parts: the keys of a dict, the class of a named tuple."""
    context = spec.context
    if context is None or isinstance(context, type):
        return context
    if spec.type in _DICTS:
        return tuple([key if type(key) is str else value_key(key) for key in context])
    if spec.type is collections.defaultdict:
        return (value_key(context[0]), tuple(map(value_key, context[1])))
    return value_key(context, Equal)


_DICTS = (dict, collections.OrderedDict)


# ---- classes -------------------------------------------------------------------------------------------------------


def has_only_attributes(cls: type, base: type = object) -> bool:
    """Whether objects of a class hold nothing besides slots, a dict, and what those of a base class hold.

    A class that is written in C has other fields, too.
    """
    slots = sum(isinstance(value, types.MemberDescriptorType) for one in cls.__mro__ for value in vars(one).values())
    # Besides slots there may be a dict and a list of weak references.
    return cls.__basicsize__ <= base.__basicsize__ + (slots + 2) * _POINTER


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes that are stored in an object, by name: those in slots, and those in its dict."""
    found: dict[str, Any] = {}
    for name, slot in _slots_of(type(value)):
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue  # there is nothing in it
    return {**found, **getattr(value, "__dict__", {})}


@functools.lru_cache(maxsize=4096)
def _slots_of(cls: type) -> tuple[tuple[str, types.MemberDescriptorType], ...]:
    """The slots of a class and those that it inherits."""
    return tuple(
        (name, slot)
        for base in reversed(cls.__mro__)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
    )


@functools.lru_cache(maxsize=4096)
def _base_of(cls: type) -> type | None:
    """The class to whose objects those of a class only add attributes; None if they may be more, or are mutable."""
    base = next((base for base in _BASES if issubclass(cls, base)), object)
    if base is object and not _is_frozen_dataclass(cls):
        return None
    if cls.__hash__ is object.__hash__:  # its objects are equal to themselves alone
        return None
    if hasattr(cls, "n_sequence_fields"):  # a tuple of C's, which may have fields besides its items
        return None
    return base if has_only_attributes(cls, base) else None


def _is_frozen_dataclass(cls: type) -> bool:
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


@functools.lru_cache(maxsize=4096)
def _compares_as_a_builtin(cls: type) -> bool:
    """Whether ``==`` is that of a builtin class; members of an enumeration that are equal by it are one."""
    owner = next(base for base in cls.__mro__ if "__eq__" in vars(base))
    return owner.__module__ in ("builtins", "enum")


# ---- how values are read -------------------------------------------------------------------------------------------


def _numpy_text(value: np.generic) -> Hashable:
    """The text of a number of NumPy's, or its type and bytes."""
    return repr(value) if isinstance(value, np.number) else (value.dtype.str, value.tobytes())


def _read_dict(value: dict[Any, Any]) -> Iterable[Any]:
    return itertools.chain.from_iterable(value.items())


def _read_range(value: range | slice) -> Iterable[Any]:
    return (value.start, value.stop, value.step)


def _read_stream(value: torch.Stream) -> Iterable[Any]:
    """Read which stream it is: ``torch.cuda.current_stream()`` makes a new object at each call."""
    return (value.stream_id, value.device_index, value.device_type, getattr(value, "__dict__", {}))


def _read_time(value: datetime.datetime | datetime.time) -> Iterable[Any]:
    return (value.isoformat(), value.fold, value.tzinfo)


def _items_of_tuple(value: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple.__iter__(value))


def _items_of_frozenset(value: frozenset[Any]) -> tuple[Any, ...]:
    return tuple(frozenset.__iter__(value))


_COMPARED = frozenset(
    {types.BuiltinFunctionType, types.MethodWrapperType, datetime.date, datetime.timedelta, re.Pattern}
)
"""More classes of which ``==`` compares all that there is, that of methods by the object which they belong to."""

_TEXTS: dict[type, Callable[[Any], str]] = {
    float: repr, complex: repr, decimal.Decimal: str,
    pathlib.PurePosixPath: str, pathlib.PosixPath: str, pathlib.PureWindowsPath: str, pathlib.WindowsPath: str,
}  # fmt: skip
"""Texts that say all there is, of objects that ``==`` takes for equal though they are not."""

_ITEMS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: iter, list: iter, torch.Size: iter, set: iter, frozenset: iter,
    dict: _read_dict, collections.OrderedDict: _read_dict, range: _read_range, slice: _read_range,
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    datetime.datetime: _read_time, datetime.time: _read_time,
    datetime.timezone: lambda value: (value.utcoffset(None), value.tzname(None)),
    torch.Stream: _read_stream, torch.cuda.Stream: _read_stream,
}  # fmt: skip
"""Readers of all that there is in objects of a class, in the order in which they give it."""

_BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__, float: float.__float__, complex: complex.__pos__, str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)), tuple: _items_of_tuple, frozenset: _items_of_frozenset,
}  # fmt: skip
"""Classes whose subclasses add attributes, and the value without these."""
