"""Arguments that are objects, taken apart: their tensors and numbers are leaves, all else of them is a layout.

To pytree, a dataclass, a namespace or any other object is a leaf. `Opened` is a node that stands for one in the
arguments of a call: its leaves are what the object and the objects, dicts and lists in its attributes hold, and its
context is a `Layout`, equal for objects of the same classes and attributes. A NumPy array is a tensor that shows its
memory. What a traced function gets are replicas that are made of the layout (`pygraph.guards.replicas`).
"""

# Attributes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pygraph.guards.argument_containers import Change, is_container
from pygraph.guards.layouts import Array, Growing, Layout, Leaf, Node, Numbers, Part, Same, Unread
from pygraph.guards.object_classes import Openable, holds_tensors, is_whole, openable
from pygraph.guards.weak_references import is_plain_reference
from pygraph.ir.value_keys import SIMPLE, Identity, value_key

_LEAF = Leaf()

# Objects in objects are followed this deep, and as many values are leaves.
_DEEP, _MOST_LEAVES = 12, 1000


class NotOpenedError(Exception):
    """An object is not taken apart: it holds what is compared by identity, or too much."""


# ---- nodes of pytree -----------------------------------------------------------------------------------------------


class OpenedCall(NamedTuple):
    """A call in whose arguments objects are taken apart.

    Attributes:
        args: The caller's own arguments.
        kwargs: The caller's own keyword arguments.
        owners: The objects, dicts, lists and arrays that were taken apart, by their numbers.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owners: list[Any]


class Opened:
    """An object in the arguments of a call, taken apart.

    Args:
        layout: Its layout.
        values: Its leaves: the classes of the layout, then its tensors, numbers and other values.
        call: The call that it is passed in; None if it was put together of other leaves.
    """

    __slots__ = ("call", "layout", "values")

    def __init__(self, layout: Layout, values: list[Any], call: OpenedCall | None = None) -> None:
        self.layout, self.values, self.call = layout, values, call

    def __getitem__(self, key: Any) -> Any:
        """A leaf by the subscripts in its name, with which conditions on numbers find it."""
        return _Inside(self, "")[key]


class _Inside(NamedTuple):
    """A part of an object that was taken apart: what has subscripts in its name so far."""

    opened: Opened
    path: str

    def __getitem__(self, key: Any) -> Any:
        path, positions = f"{self.path}[{key!r}]", self.opened.layout.positions
        if path in positions:
            return self.opened.values[positions[path]]
        if not any(one.startswith(path) for one in positions):
            raise KeyError(key)
        return _Inside(self.opened, path)


class _Key(NamedTuple):
    """The entry of a key path for a leaf of an object."""

    path: str

    def __str__(self) -> str:
        return self.path


def _flatten(opened: Opened) -> tuple[list[Any], Layout]:
    return opened.values, opened.layout


def _flatten_with_keys(opened: Opened) -> tuple[list[tuple[Any, Any]], Layout]:
    return [(_Key(path), value) for path, value in zip(opened.layout.paths, opened.values, strict=True)], opened.layout


def _unflatten(values: Any, layout: Any) -> Opened:
    return Opened(layout, list(values))


pytree.register_pytree_node(Opened, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys)


def is_opened(value: object) -> TypeGuard[Opened]:
    """Whether a value is an object that was taken apart."""
    return type(value) is Opened


def is_of_opened(entry: Any) -> bool:
    """Whether the entry of a key path is that for a leaf of an object that was taken apart."""
    return type(entry) is _Key


# ---- taking apart --------------------------------------------------------------------------------------------------


class Opening:
    """Takes objects and containers among the arguments of one call apart.

    Args:
        args: Its arguments.
        kwargs: Its keyword arguments.
        is_named: Whether code of a function and of a class has a name for anything; None if all values may be read.
        growing: The lists, by identity, to which its function appends.
        changing: The changes that its function makes to containers and to objects without tensors, by their names.

    Attributes:
        call: The call, with what was found.
        has_unread: Whether there are values that are not expected to be read.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_named: Callable[[type, str], bool] | None,
        growing: Collection[int] = (),
        changing: Mapping[str, Change] = types.MappingProxyType({}),
    ) -> None:
        self.call = OpenedCall(args, kwargs, [])
        self._growing, self._changing = growing, changing
        self.has_unread = False
        self._is_named, self._is_unnamed = is_named, False
        self._numbers: dict[int, int] = {}
        self._leaves: list[Any] = []
        self._classes: dict[type, None] = {}
        self._unread_classes: dict[type, None] = {}
        self._has_tensors = False
        self._foreign = False

    def open(self, value: Any, name: str) -> Opened:
        """Take one leaf or container apart.

        Args:
            value: It.
            name: Its name.

        Raises:
            NotOpenedError: It stays a leaf.
        """
        self._leaves, self._classes, self._unread_classes = [], {}, {}
        self._has_tensors = self._foreign = False
        count = len(self.call.owners)
        try:
            root = self._part(value, 0, name if self._changing else "")
            # It may be the very same at every call, as ``self`` is, and be known to others by that.
            may_be_self = isinstance(root, Node) and type(value).__hash__ is not None
            if may_be_self and (self._foreign or not (self._has_tensors or name in self._changing)):
                raise NotOpenedError
        except NotOpenedError:
            for owner in self.call.owners[count:]:
                del self._numbers[id(owner)]
            del self.call.owners[count:]
            raise
        layout = Layout(root, tuple(self._classes), tuple(self._unread_classes))
        return Opened(layout, [*layout.classes, *self._leaves], self.call)

    def _part(self, value: Any, depth: int, name: str) -> Part:
        cls = type(value)
        if issubclass(cls, torch.Tensor):
            self._has_tensors = True
            return self._leaf(value)
        if cls in _VALUES:
            return self._unread(value) if cls is str and self._is_unnamed else self._leaf(value)
        if id(value) in self._numbers:
            return Same(self._numbers[id(value)], False)
        if cls is np.ndarray:
            return self._array(value)
        if depth > _DEEP:
            raise NotOpenedError
        if cls is tuple or pytree.is_namedtuple_class(cls):
            return Node(cls, (), (*range(len(value)),), self._parts(value, depth, name))
        if is_container(value) and getattr(value, "default_factory", None) in _FACTORIES:
            return self._container(value, depth, name)
        if is_plain_reference(value):
            target = self._numbers.get(id(value()))
            if target is not None:
                return Same(target, True)
        kind = openable(cls)
        if kind is None or (depth and cls.__hash__ is not None and not holds_tensors(value)):
            return self._other(value, kind)
        return self._object(value, kind, depth, name)

    def _parts(self, values: Iterable[Any], depth: int, name: str) -> tuple[Part, ...]:
        if not name:
            return tuple([self._part(value, depth + 1, "") for value in values])
        return tuple([self._part(value, depth + 1, f"{name}[{index}]") for index, value in enumerate(values)])

    def _container(self, value: Any, depth: int, name: str) -> Part:
        number, cls = self._number(value), type(value)
        if cls is list and (id(value) in self._growing or self._changing.get(name) is Change.GROWS):
            return Growing(number)
        if self._changing.get(name) is Change.HOLDS_OTHERS and (numbers := numbers_of(value)) is not None:
            self._leaf(numbers)
            return Numbers(number, type(value[0]))
        if isinstance(value, dict):
            made_with: Any = getattr(value, "default_factory", None)
            return Node(cls, (), _keys(value.keys()), self._items(value, depth, name), made_with)
        made_with = value.maxlen if cls is collections.deque else None
        return Node(cls, (), (*range(len(value)),), self._parts(value, depth, name), made_with)

    def _items(self, value: dict[Any, Any], depth: int, name: str) -> tuple[Part, ...]:
        if not name:
            return self._parts(dict.values(value), depth, "")
        return tuple([self._part(item, depth + 1, f"{name}[{key!r}]") for key, item in dict.items(value)])

    def _object(self, value: Any, kind: Openable, depth: int, name: str) -> Node:
        self._number(value)
        self._classes[type(value)] = None
        names, values = kind.attributes(value)
        parts = [self._attribute(type(value), *pair, depth, name) for pair in zip(names, values, strict=True)]
        if kind.base is not dict:
            return Node(type(value), names, (), (*parts,))
        keys = _keys(dict.keys(value))
        return Node(type(value), names, keys, (*parts, *self._items(value, depth, name)))

    def _attribute(self, cls: type, name: str, value: Any, depth: int, of: str) -> Part:
        path = of and f"{of}.{name}"
        if self._is_named is None or type(value) not in _WITH_TEXTS or self._is_unnamed:
            return self._part(value, depth + 1, path)
        self._is_unnamed = not self._is_named(cls, name)
        try:
            return self._part(value, depth + 1, path)
        finally:
            self._is_unnamed = False

    def _array(self, value: np.ndarray) -> Array:
        if value.dtype.kind not in "biufc" or not value.dtype.isnative or not value.flags.writeable:
            raise NotOpenedError
        try:
            tensor = torch.from_numpy(value)
        except (TypeError, ValueError):  # of a dtype or with strides that tensors do not have
            raise NotOpenedError from None
        self._has_tensors = True
        self._leaf(tensor)
        return Array(self._number(value), value.dtype.str)

    def _other(self, value: Any, kind: Openable | None) -> Part:
        if is_whole(value):
            raise NotOpenedError
        is_itself = type(value_key(value)) is Identity
        self._foreign |= kind is None and is_itself and not isinstance(value, type)
        if not is_itself or self._is_named is None or issubclass(type(value), _CODE):
            return self._leaf(value)
        return self._unread(value)

    def _unread(self, value: Any) -> Part:
        self.has_unread = True
        if type(value) is not str:  # of which no one is told from an equal one
            self._unread_classes[type(value)] = None
        return Unread(self._number(value), type(value))

    def _leaf(self, value: Any) -> Leaf:
        self._leaves.append(value)
        if len(self._leaves) > _MOST_LEAVES:
            raise NotOpenedError
        return _LEAF

    def _number(self, value: Any) -> int:
        number = self._numbers[id(value)] = len(self.call.owners)
        self.call.owners.append(value)
        return number


_CODE = (type, types.FunctionType, types.BuiltinFunctionType)
_VALUES = SIMPLE | {float, complex}
_WITH_TEXTS = {str, list, tuple, dict}
_FACTORIES = (None, list, dict, set, tuple, int, float, bool, str)


def _keys(names: Iterable[Any]) -> tuple[Any, ...]:
    keys = tuple([(type(key), key) for key in names])
    if any(kind not in SIMPLE for kind, _ in keys):
        raise NotOpenedError
    return keys


def numbers_of(value: Any) -> torch.Tensor | None:
    """A tensor of the numbers in a list; None if there are others than integers alone, or floats alone.

    >>> numbers_of([1, 2]), numbers_of([0.5, 2]), numbers_of([])
    (tensor([1, 2]), None, None)
    """
    kinds = set(map(type, value)) if type(value) is list else set[type]()
    dtype = _DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
    if dtype is None:
        return None
    try:
        return torch.tensor(value, dtype=dtype, device="cpu")
    except (OverflowError, RuntimeError):  # an integer of more than 64 bits
        return None


_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64}


def is_openable(leaf: Any) -> bool:
    """Whether a leaf may be taken apart: a NumPy array, or an object of a class that allows that."""
    return type(leaf) is np.ndarray or openable(type(leaf)) is not None
