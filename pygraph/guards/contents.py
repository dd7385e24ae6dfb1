"""State that lies in neither a dict nor a list, in a form that a guard on an item can watch and a snapshot put back."""

# What is read has items of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import mmap
import operator
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pygraph.ir.constants import IMMUTABLE

_EXACT = frozenset(IMMUTABLE)

# Memory of arrays is compared at every call, so that of larger ones, or of very many, is taken not to change.
_MAX_BYTES, MAX_BYTES_IN_ALL = 2**16, 2**20

_UNSET = object()


def is_plain(value: object) -> bool:
    """Whether a value is immutable and nothing but what `IMMUTABLE` says: an object of a derived class has attributes.

    Its class may also say of itself what it likes, so that it is only equal to itself.
    """
    return type(value) in _EXACT


def has_value(value: Any) -> bool:
    """Whether another object can be the `same`."""
    kind = type(value)
    return kind in _EXACT or kind in _COMPOSED or issubclass(kind, np.generic)


def is_value(value: Any) -> bool:
    """Whether a value is made of nothing but plain ones."""
    return has_value(value) and (type(value) not in _COMPOSED or all(map(is_value, _parts(value))))


def same(value: Any, expected: Any) -> bool:
    """Whether two values are immutable and equal, down to the type and the sign of zero.

    Tuples are, if their items are the same objects or equal in this way.
    """
    kind = type(value)
    if kind is not type(expected):
        return False
    if kind is str or kind is bytes:
        return value == expected
    if kind in _EXACT:
        return repr(value) == repr(expected)
    if kind in _COMPOSED:
        these, those = _parts(value), _parts(expected)
        return len(these) == len(those) and all(a is b or same(a, b) for a, b in zip(these, those, strict=True))
    if issubclass(kind, np.generic) and not value.dtype.hasobject:
        return value.dtype == expected.dtype and value.tobytes() == expected.tobytes()
    return False


_COMPOSED = frozenset({tuple, slice, range})


def _parts(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value.start, value.stop, value.step)


class Contents:
    """What an object holds; ``contents[…]`` tells whether it is still what it was when this was made.

    Args:
        read: The items, as they are now.
        write: Puts items back; by default, they are only compared.
    """

    def __init__(
        self, read: Callable[[], Sequence[Any]], write: Callable[[Sequence[Any]], object] = lambda _: None
    ) -> None:
        self._read, self._write = read, write
        self._before = read()

    def __getitem__(self, key: object) -> bool:
        now, before = self._read(), self._before
        if len(now) != len(before):
            return False
        return all(map(operator.is_, now, before)) or all(a is b or same(a, b) for a, b in zip(now, before))  # noqa: B905

    def restore(self) -> bool:
        """Put back what has changed; whether anything had."""
        if self[0]:
            return False
        self._write(self._before)
        return True


class _ArrayContents(Contents):
    """The memory of a NumPy array, and how it is read."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array, self._copy = array, np.array(array)  # the copy keeps the items of an array of objects
        self._state = (array.shape, array.dtype, array.tobytes())

    def __getitem__(self, key: object) -> bool:
        array = self._array
        return (array.shape, array.dtype, array.tobytes()) == self._state

    def restore(self) -> bool:
        if self[0]:
            return False
        if self._array.shape == self._copy.shape and self._array.flags.writeable:
            self._array[...] = self._copy
        return True


class SetContents(Contents):
    """The items of a set, by order, which a function may have gone by.

    Attributes:
        members: The set.
    """

    def __init__(self, members: set[Any]) -> None:
        self.members = members

        def refill(items: Sequence[Any]) -> None:
            set.clear(members)
            set.update(members, items)

        super().__init__(lambda: list[Any](set.__iter__(members)), refill)

    @property
    def before(self) -> tuple[Any, ...]:
        """What the items were."""
        return tuple(self._before)


def contents_of(value: Any, memory: int) -> Contents | None:
    """The contents of a set, a deque, a NumPy array of at most so much memory, or of raw memory; None for all else."""
    if isinstance(value, set):
        return SetContents(value)
    if isinstance(value, collections.deque):

        def extend(items: Sequence[Any]) -> None:
            collections.deque.clear(value)
            collections.deque.extend(value, items)

        return Contents(lambda: list[Any](collections.deque.__iter__(value)), extend)
    if isinstance(value, bytearray) and len(value) <= _MAX_BYTES:

        def overwrite(items: Sequence[Any]) -> None:
            value[:] = items[0]

        return Contents(lambda: (bytes(value),), overwrite)
    if isinstance(value, array.array) and len(value) * value.itemsize <= _MAX_BYTES:

        def refill(items: Sequence[Any]) -> None:
            value[:] = array.array(value.typecode, items[0])  # pyright: ignore

        return Contents(lambda: (value.tobytes(),), refill)  # pyright: ignore
    if isinstance(value, np.ndarray) and value.nbytes <= min(_MAX_BYTES, memory):
        return _ArrayContents(value)
    if issubclass(type(value), _RAW):
        return _raw_contents(value)
    return None


def _raw_contents(value: Any) -> Contents | None:
    try:
        size = memoryview(value).nbytes
    except ValueError:  # it has been closed
        return None
    if size > _MAX_BYTES:
        return None

    def write(items: Sequence[Any]) -> None:
        with memoryview(value) as view:
            if view.c_contiguous and not view.readonly:
                (ctypes.c_char * size).from_buffer(value).raw = items[0]

    return Contents(lambda: (memoryview(value).tobytes(),), write)


# Whose memory is all that they are.
_RAW = (memoryview, mmap.mmap, ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)  # pyright: ignore


def items_in_thread(value: threading.local | contextvars.ContextVar[Any]) -> dict[str, Any]:
    """What the current thread finds in a thread-local, or as the value of a context variable."""
    if isinstance(value, threading.local):
        return threading.local.__getattribute__(value, "__dict__")
    try:
        return {"get()": value.get()}  # its default, too
    except LookupError:
        return {}


def contents_in_thread(value: threading.local | contextvars.ContextVar[Any]) -> Contents:
    """The same as contents; what a context variable was is put back by leaving the context."""

    def write(items: Sequence[Any]) -> None:
        if isinstance(value, threading.local):
            state = items_in_thread(value)
            state.clear()
            state.update(zip(items[::2], items[1::2], strict=True))

    return Contents(lambda: [part for item in items_in_thread(value).items() for part in item], write)


def is_weak(value: Any) -> bool:
    """Whether it is a weak reference or a proxy, which says that it is of its referent's class."""
    return issubclass(type(value), (weakref.ReferenceType, *weakref.ProxyTypes))


def referent_of(reference: Any) -> Any:
    """What a weak reference or a proxy refers to; None if that is no more, or cannot be told."""
    if issubclass(type(reference), weakref.ReferenceType):
        return weakref.ReferenceType.__call__(reference)
    try:
        return reference.__init__.__self__
    except (ReferenceError, AttributeError):
        return None


def life_of(reference: Any) -> Contents:
    """Whether there still is what a weak reference or a proxy refers to; it is never another object."""
    return Contents(lambda: (referent_of(reference) is not None,))


class AttributesBehind:
    """The attributes of an object to which only weak references lead; neither it nor its dict is kept alive."""

    def __init__(self, value: object) -> None:
        self._reference = weakref.ref(value)

    def now(self) -> dict[str, Any]:
        """All of them; none if it is no more."""
        value = self._reference()
        return {} if value is None else attributes_of(value) or {}

    def number(self) -> Contents:
        """How many there are."""
        return Contents(lambda: (len(self.now()),))

    def attribute(self, key: str) -> Contents:
        """One of them."""
        return Contents(lambda: (self.now().get(key, _UNSET),))


def factory_of(value: collections.defaultdict[Any, Any]) -> Contents:
    """What makes the missing values of a dict."""
    field: Any = vars(collections.defaultdict)["default_factory"]

    def read() -> list[Any]:
        return [field.__get__(value)]

    def write(items: Sequence[Any]) -> None:
        field.__set__(value, items[0])

    return Contents(read, write)


def variable_of(cell: types.CellType) -> Contents:
    """The value of a variable that a function closes over, or that it has none yet."""

    def read() -> list[Any]:
        try:
            return [cell.cell_contents]
        except ValueError:
            return []

    def write(items: Sequence[Any]) -> None:
        if items:
            cell.cell_contents = items[0]
        else:
            del cell.cell_contents

    return Contents(read, write)


def length_of(value: Any) -> Contents:
    """The length alone, of what has too many items to compare them."""
    return Contents(lambda: (len(value),))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's dict, if it has one; nothing of the object's class is run for it."""
    slot = dict_slot_of(type(value))
    state = None if slot is None else slot.__get__(value)
    return state if isinstance(state, dict) else None


def dict_slot_of(cls: type) -> types.GetSetDescriptorType | types.MemberDescriptorType | None:
    """What reads and sets the dicts of a class's objects; None if they have none."""
    for base in cls.__mro__:
        found = vars(base).get("__dict__")
        if isinstance(found, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return found
    return None


def slots_of(value: Any) -> tuple[dict[str, Any], Contents] | None:
    """The values in an object's slots by name, and the same as contents; None if its class has none."""
    slots = {
        name: slot
        for base in reversed(type(value).__mro__)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
    }
    if not slots:
        return None

    def read() -> list[Any]:
        return [_slot(slot, value) for slot in slots.values()]

    def write(items: Sequence[Any]) -> None:
        for slot, item in zip(slots.values(), items, strict=True):
            if item is not _UNSET:
                slot.__set__(value, item)
            elif _slot(slot, value) is not _UNSET:
                slot.__delete__(value)

    found = zip(slots, read(), strict=True)
    return {name: item for name, item in found if item is not _UNSET}, Contents(read, write)


def _slot(slot: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _UNSET


def gradients_of(tensors: Sequence[torch.Tensor]) -> Contents:
    """Which tensors are the gradients of others."""

    def write(items: Sequence[Any]) -> None:
        for tensor, gradient in zip(tensors, items, strict=True):
            tensor.grad = gradient

    return Contents(lambda: [tensor.grad for tensor in tensors], write)
