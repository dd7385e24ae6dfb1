"""The contents of objects that are neither dicts nor lists, in one form that guards compare and snapshots restore."""

# Items are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import array
import collections
import ctypes
import mmap
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pygraph.guards.values import same

# Memory of arrays is compared at every call, so that of larger ones, or of very many, is taken not to change.
_MAX_BYTES, MAX_BYTES_IN_ALL = 2**16, 2**20


class Contents:
    """The items of an object, as they were when this was made; ``contents[…]`` tells whether they still are the same.

    Args:
        read: Reads the items, as they are now.
        write: Puts items back; by default, they are only compared.

    Attributes:
        container: The deque that they are the items of; None if they are of something else.
    """

    container: collections.deque[Any] | None = None

    def __init__(
        self, read: Callable[[], Sequence[Any]], write: Callable[[Sequence[Any]], object] = lambda _: None
    ) -> None:
        self._read, self._write = read, write
        self._before = read()

    @property
    def before(self) -> Sequence[Any]:
        """The items, as they were when this was made."""
        return self._before

    def __getitem__(self, key: object) -> bool:
        now, before = self._read(), self._before
        if len(now) != len(before):
            return False
        return all(map(operator.is_, now, before)) or all(a is b or same(a, b) for a, b in zip(now, before))  # noqa: B905

    def restore(self) -> bool:
        """Put the items back if they have changed; whether they had."""
        if self[0]:
            return False
        self._write(self._before)
        return True


class _ArrayContents(Contents):
    """The memory, shape and dtype of a NumPy array."""

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
    """The items of a set in their order, in which a function may have iterated over them.

    Attributes:
        members: The set.
    """

    def __init__(self, members: set[Any]) -> None:
        self.members = members

        def refill(items: Sequence[Any]) -> None:
            set.clear(members)
            set.update(members, items)

        super().__init__(lambda: list[Any](set.__iter__(members)), refill)


def contents_of(value: Any, memory: int) -> Contents | None:
    """The contents of a set, a deque, raw memory, or a NumPy array of at most ``memory`` bytes; None for all else."""
    if isinstance(value, set):
        return SetContents(value)
    if isinstance(value, collections.deque):

        def extend(items: Sequence[Any]) -> None:
            collections.deque.clear(value)
            collections.deque.extend(value, items)

        contents = Contents(lambda: list[Any](collections.deque.__iter__(value)), extend)
        contents.container = value
        return contents
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


# Classes whose objects are nothing but memory.
_RAW = (memoryview, mmap.mmap, ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)  # pyright: ignore


def factory_of(value: collections.defaultdict[Any, Any]) -> Contents:
    """The function that makes the missing values of a dict."""
    field: Any = vars(collections.defaultdict)["default_factory"]

    def read() -> list[Any]:
        return [field.__get__(value)]

    def write(items: Sequence[Any]) -> None:
        field.__set__(value, items[0])

    return Contents(read, write)


def variable_of(cell: types.CellType) -> Contents:
    """The value of a variable that a function closes over; no items while it is unassigned."""

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
    """The length alone, of a container with too many items to compare them."""
    return Contents(lambda: (len(value),))


def flags_of(tensors: Sequence[torch.Tensor]) -> Contents:
    """Whether tensors require grad."""
    return Contents(lambda: [tensor.requires_grad for tensor in tensors])


def layouts_of(tensors: Sequence[torch.Tensor]) -> Contents:
    """Whether tensors require grad, and have the shapes, dtypes and devices that they had."""

    def read() -> list[object]:
        return [
            item
            for tensor in tensors
            for item in (tensor.requires_grad, tuple(tensor.shape), tensor.dtype, str(tensor.device))
        ]

    return Contents(read)


def gradients_of(tensors: Sequence[torch.Tensor]) -> Contents:
    """The gradients of tensors."""

    def write(items: Sequence[Any]) -> None:
        for tensor, gradient in zip(tensors, items, strict=True):
            tensor.grad = gradient

    return Contents(lambda: [tensor.grad for tensor in tensors], write)
