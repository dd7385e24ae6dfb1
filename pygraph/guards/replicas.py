"""Replicas: objects, dicts and lists of the same kinds as a call's, for a function that is run on other leaves.

They refer to each other as the caller's do, and to nothing of the caller's but leaves. Whatever a function stores on
them is found, so that it can be stored on the caller's own; so are replicas that it returns. One that it has given away
otherwise (stored elsewhere, put into a new object) is found as well, as more refers to it than before.
"""

# Attributes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import contextlib
import enum
import functools
import gc
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from pygraph.errors import TraceError
from pygraph.guards.argument_containers import Change
from pygraph.guards.growth import GrowingList, added_to, empty
from pygraph.guards.layouts import Array, Growing, Leaf, Node, Numbers, Part, Same, Unread, names_of
from pygraph.guards.object_classes import openable
from pygraph.guards.opened import Opened
from pygraph.ir.structures import unflatten

Owners = tuple[tuple[int, int], ...]
"""Leaves of a value that are objects of the caller's: their positions, and their numbers among those of the call."""


class Kind(enum.Enum):
    """The kind of a location in an object of a call."""

    ATTRIBUTE = 1
    ITEM = 2
    ITEMS = 3
    """All items of a list or a deque."""
    ENTRIES = 4
    """All entries of a dict, in their order."""
    END = 5
    """The end of a list, to which items are added."""


class Write(NamedTuple):
    """A location in an object of a call where its function has stored a value, or deleted one.

    Attributes:
        number: The object's number among those of the call.
        kind: The kind of the location.
        key: The name of the attribute, or the key of a dict.
        is_deleted: Whether nothing is there now.
        name: The name in reports.
    """

    number: int
    kind: Kind
    key: Any
    is_deleted: bool
    name: str

    def store(self, owner: Any, value: Any) -> None:
        """Store a value in the caller's own object, or delete what is there; no code of its class is run."""
        if self.kind is Kind.ITEMS:
            _store_items(owner, value)
        elif self.kind is Kind.END:
            owner.extend(value)
        elif self.kind is Kind.ENTRIES:
            _store_entries(owner, value)
        elif self.kind is Kind.ITEM:
            _store_item(owner, self.key, value, is_deleted=self.is_deleted)
        else:
            kind = openable(type(owner))
            assert kind is not None
            if self.is_deleted:
                kind.remove(owner, self.key)
            else:
                kind.put(owner, self.key, value)


def _store_items(owner: Any, items: Sequence[Any]) -> None:
    owner.clear()
    owner.extend(items)


def _store_entries(owner: dict[Any, Any], entries: dict[Any, Any]) -> None:
    _class_of_dict(owner).clear(owner)
    for key, value in entries.items():
        _store_item(owner, key, value)


def _class_of_dict(owner: dict[Any, Any]) -> Any:
    """The class whose methods a dict has, without those of a user's class."""
    return type(owner) if openable(type(owner)) is None else dict


def _store_item(owner: dict[Any, Any], key: Any, value: Any, *, is_deleted: bool = False) -> None:
    cls = _class_of_dict(owner)
    if is_deleted:
        cls.__delitem__(owner, key)
    else:
        cls.__setitem__(owner, key, value)


class Replicas:
    """The replicas of one run.

    Args:
        array: Makes a replica of a NumPy array, of its name, its dtype, and the tensor that shows its memory.
        numbers: Makes a replica of a list of numbers, of its name, their class, the tensor that shows them, and what is
            called when they are read.
        unread: Makes a replica of a value that is not expected to be read, of its name and its class.

    Attributes:
        read: What is known by now of lists of which something was read that was not to be, by their names.
    """

    def __init__(
        self,
        array: Callable[[str, str, Any], Any],
        numbers: Callable[[str, type, Any, Callable[[], object]], Any],
        unread: Callable[[str, type], Any],
    ) -> None:
        self._array, self._numbers, self._unread = array, numbers, unread
        self.read: dict[str, Change] = {}
        self._made: list[Any] = []
        self._tuples: list[Any] = []
        self._names: list[str] = []
        self._before: list[tuple[dict[Any, Any], Any]] = []
        self._references: list[int] = []

    def make(self, opened: Opened, name: str) -> Any:
        """The replica of an object of the call, of which earlier ones are made already.

        Args:
            opened: The object, taken apart.
            name: What reports call it.
        """
        return self._part(opened.layout.root, iter(opened.values[len(opened.layout.classes) :]), name)

    def _part(self, part: Part, values: Iterator[Any], name: str) -> Any:
        if isinstance(part, Leaf):
            return next(values)
        if isinstance(part, Same):
            made = self._made[part.number]
            return weakref.ref(made) if part.is_weak else made
        if isinstance(part, Array):
            return self._numbered(self._array(name, part.dtype, next(values)), name)
        if isinstance(part, Numbers):
            note_read = functools.partial(self.read.update, {name: Change.IS_READ})
            return self._numbered(self._numbers(name, part.cls, next(values), note_read), name)
        if isinstance(part, Growing):
            note_read = functools.partial(self.read.update, {name: Change.CHANGES})
            return self._numbered(GrowingList([], name, note_read), name)
        return (
            self._numbered(self._unread(name, part.cls), name)
            if isinstance(part, Unread)
            else self._node(part, values, name)
        )

    def _node(self, node: Node, values: Iterator[Any], name: str) -> Any:
        inner = zip(node.parts, names_of(node), strict=True)
        if issubclass(node.cls, tuple):
            made = tuple.__new__(node.cls, [self._part(part, values, name + rest) for part, rest in inner])
            self._tuples.append(made)
            return made
        kind = openable(node.cls)
        made = self._numbered(_new(node) if kind is None else kind.new(), name)
        parts = [self._part(part, values, name + rest) for part, rest in inner]
        if node.cls in _LISTS:
            made.extend(parts)
            return made
        for attribute, part in zip(node.names, parts, strict=False):
            assert kind is not None
            kind.put(made, attribute, part)
        for (_, key), part in zip(node.keys, parts[len(node.names) :], strict=True):
            _store_item(made, key, part)
        return made

    def _numbered(self, made: Any, name: str) -> Any:
        self._made.append(made)
        self._names.append(name)
        return made

    # -- what a function has done with them -------------------------------------------------------------------------

    def watch(self) -> None:
        """Note what is stored on them, and how much refers to them, before a function runs."""
        self._references = self._counts()
        self._before = [_contents(made) for made in self._made]

    def _counts(self) -> list[int]:
        return list(map(sys.getrefcount, self._made))

    def grown(self) -> list[str]:
        """The names of lists that hold what they held before, and more behind it."""
        return [
            name
            for name, made, (_, before) in zip(self._names, self._made, self._before, strict=True)
            if type(made) is list and len(made) > len(before) and all(map(operator.is_, made, before))
        ]

    def is_one(self, value: Any) -> bool:
        """Whether a value is one of them."""
        return any(value is made for made in self._made)

    def has_tuple(self, value: Any) -> bool:
        """Whether a value is a tuple that the caller has in an object."""
        return any(value is made for made in self._tuples)

    def check_references(self) -> None:
        """Refuse a function that has given a replica away: whoever has it now is to have the caller's own object.

        Raises:
            TraceError: It has.
        """
        if self._counts() == self._references:
            return
        gc.collect()  # functions that refer to themselves are garbage by now
        _clear_frames(self._made)
        for before, now, name in zip(self._references, self._counts(), self._names, strict=True):
            if now != before:
                raise TraceError(f"it stores {name} elsewhere, or returns something that refers to it")

    def replaced(self, value: Any) -> tuple[Any, Owners]:
        """A value with `...` for each replica in it, and which replicas there were; some containers leave None out."""
        numbers = {id(made): number for number, made in enumerate(self._made)}
        leaves, tree = pytree.tree_flatten(value, is_leaf=lambda value: id(value) in numbers)
        owners = tuple((index, numbers[id(leaf)]) for index, leaf in enumerate(leaves) if id(leaf) in numbers)
        if not owners:
            return value, ()
        return unflatten([... if id(leaf) in numbers else leaf for leaf in leaves], tree), owners

    def writes(self) -> tuple[tuple[Write, ...], list[Any]]:
        """Find where the function has stored something on them, and the values."""
        writes: list[Write] = []
        values: list[Any] = []
        for number, (made, (before, items)) in enumerate(zip(self._made, self._before, strict=True)):
            attributes, now = _contents(made)
            name = self._names[number]
            for key, value, is_deleted in _changes(before, attributes):
                writes.append(Write(number, Kind.ATTRIBUTE, key, is_deleted, f"{name}.{key}"))
                values.append(value)
            if isinstance(now, dict):
                changes = [*_changes(items, now)]
                if _keys_after(items, changes) != [*now]:
                    writes.append(Write(number, Kind.ENTRIES, None, False, name))
                    values.append(now)
                    continue
                for key, value, is_deleted in changes:
                    writes.append(Write(number, Kind.ITEM, key, is_deleted, f"{name}[{key!r}]"))
                    values.append(value)
            elif type(made) is GrowingList:
                if now:
                    writes.append(Write(number, Kind.END, None, False, name))
                    values.append(now)
            elif len(items) != len(now) or any(a is not b for a, b in zip(items, now, strict=True)):
                writes.append(Write(number, Kind.ITEMS, None, False, name))
                values.append(now)
        return tuple(writes), values

    def put_back(self) -> None:
        """Have the replicas refer to each other as before, so that references from elsewhere can be counted."""
        for made, (attributes, items) in zip(self._made, self._before, strict=True):
            kind = openable(type(made))
            if kind is not None:
                for name in [*kind.read(made)]:
                    kind.remove(made, name)
                for name, value in attributes.items():
                    kind.put(made, name, value)
            if type(made) is GrowingList:
                empty(made)
            elif type(made) in _LISTS:
                _store_items(made, items)
            elif isinstance(items, dict):
                _store_entries(made, items)
        self._before.clear()


_LISTS = (list, collections.deque)


def _new(node: Node) -> Any:
    """A container without items, of the class of a node."""
    if node.cls is collections.deque:
        return collections.deque(maxlen=node.made_with)
    return collections.defaultdict(node.made_with) if node.cls is collections.defaultdict else node.cls()


def _clear_frames(values: list[Any]) -> None:
    """Clear frames of functions that have ended and refer to one of these values; tracebacks of caught errors do."""
    for frame in gc.get_referrers(*values):
        if type(frame) is types.FrameType and not frame.f_code.co_flags & _SUSPENDABLE:
            with contextlib.suppress(RuntimeError):  # it has not ended
                frame.clear()


_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _contents(made: Any) -> tuple[dict[str, Any], Any]:
    """The attributes of an object, and a copy of the items of a dict or a list."""
    cls = type(made)
    kind = openable(cls)
    if kind is not None:
        is_dict = kind.base is dict
        return dict(kind.read(made)), {key: dict.__getitem__(made, key) for key in dict.keys(made)} if is_dict else ()
    if cls is GrowingList:
        return {}, added_to(made)
    if cls in _LISTS:
        return {}, [*made]
    return {}, {**made} if issubclass(cls, dict) else ()


def _changes(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[tuple[Any, Any, bool]]:
    """The keys whose values are others, the values, and whether they are gone."""
    yield from ((key, None, True) for key in before if key not in now)
    yield from ((key, value, False) for key, value in now.items() if key not in before or before[key] is not value)


def _keys_after(before: dict[Any, Any], changes: list[tuple[Any, Any, bool]]) -> list[Any]:
    """The keys of a dict, in their order, once its entries have been changed one by one."""
    keys = dict.fromkeys(before)
    for key, _, is_deleted in changes:
        if is_deleted:
            del keys[key]
        else:
            keys[key] = None
    return [*keys]


def with_owners(value: Any, owners: Owners, objects: Sequence[Any]) -> Any:
    """A value with the caller's own objects in the stead of `...`, where there were replicas."""
    if not owners:
        return value
    leaves, tree = pytree.tree_flatten(value)
    for index, number in owners:
        leaves[index] = objects[number]
    return unflatten(leaves, tree)
