"""Locations of Python's state: an entry of a dict, the items of a list, a closed-over variable, a flag of a tensor."""

# Values are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
import dataclasses
import enum
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.autograd.graph import increment_version
from torch.overrides import handle_torch_function, has_torch_function_unary

from pygraph.errors import StateChangeError
from pygraph.guards.contents import Contents
from pygraph.guards.objects import has_objects
from pygraph.guards.storage import delete_item, store_item, stored_item


class Nothing(enum.Enum):
    """The value of a location where nothing is stored."""

    ABSENT = "absent"


ABSENT = Nothing.ABSENT


class Location:
    """A location that stores a value.

    Attributes:
        name: The name in reports.
    """

    __slots__ = ()
    name: str

    def __call__(self) -> Any:
        """The value; None if there is none any more."""
        value = self.get()
        return None if value is ABSENT else value

    def get(self) -> Any:
        """The value, or `ABSENT`."""
        raise NotImplementedError

    def put(self, value: Any) -> None:
        """Store a value, or remove it if that is `ABSENT`."""
        raise NotImplementedError

    def hide(self) -> Callable[[], None]:
        """Have guards that are made meanwhile not depend on the value; returns what shows it again."""
        value = self.get()
        if value is not ABSENT:
            self.put(None)
        return lambda: self.put(value)

    def is_at(self, owner: Any, key: Any) -> bool:
        """Whether this is the location of ``key`` in a container, or of a cell if ``key`` is None."""
        raise NotImplementedError

    def is_of_all(self, owner: Any) -> bool:
        """Whether this is the location of all that a container, or the `Contents` of one, has."""
        del owner
        return False

    def is_same(self, other: Location) -> bool:
        """Whether another location is this one."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Item(Location):
    """An entry of a container.

    Attributes:
        container: A dict, or a list.
        key: Its key or its index.
        name: The name in reports.
    """

    container: Any
    key: Any
    name: str = ""

    def get(self) -> Any:
        """The value, or `ABSENT`."""
        try:
            return stored_item(self.container, self.key)
        except LookupError:
            return ABSENT

    def put(self, value: Any) -> None:
        """Store a value, or remove it if that is `ABSENT`."""
        if value is not ABSENT:
            store_item(self.container, self.key, value)
        elif self.get() is not ABSENT:
            delete_item(self.container, self.key)

    def is_at(self, owner: Any, key: Any) -> bool:
        """Whether an entry is this one."""
        return owner is self.container and type(key) is type(self.key) and key == self.key

    def is_same(self, other: Location) -> bool:
        """Whether another location is this one."""
        return isinstance(other, Item) and self.is_at(other.container, other.key)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Items(Location):
    """All items of a list or a deque, which stays the same object.

    Attributes:
        container: The list or the deque.
        name: The name in reports.
    """

    container: list[Any] | collections.deque[Any]
    name: str = ""

    def get(self) -> Any:
        """The items, in a list of their own."""
        return [*self.container]

    def put(self, value: Any) -> None:
        """Replace the items."""
        self.container.clear()
        self.container.extend(value)

    def hide(self) -> Callable[[], None]:
        """Have guards that are made meanwhile not depend on the items; returns what shows them again."""
        items = self.get()
        self.container.clear()
        return lambda: self.put(items)

    def is_at(self, owner: Any, key: Any) -> bool:
        """Whether an item is one of these."""
        return self.is_of_all(owner)

    def is_of_all(self, owner: Any) -> bool:
        """Whether these are all that a container, or the `Contents` of one, has."""
        return owner is self.container or (isinstance(owner, Contents) and owner.container is self.container)

    def is_same(self, other: Location) -> bool:
        """Whether another location is that of the same items."""
        return isinstance(other, Items) and other.container is self.container


FEW_ITEMS = 64
"""A container with more items is no input of a graph, which would take each of them."""

_CONTAINERS = (list, dict, set, tuple, collections.deque, np.ndarray)


def items_of(name: str, container: Any, before: Sequence[Any]) -> Items | None:
    """Find the location of the items of a list or a deque that has changed.

    Args:
        name: The name in reports.
        container: The list or the deque, as it is now.
        before: The items that it had.

    Returns:
        The location; None if calls cannot take and return the items. Containers and objects among them would be others
        after a call, also for who refers to them elsewhere.
    """
    if type(container) not in (list, collections.deque) or max(len(container), len(before)) > FEW_ITEMS:
        return None
    leaves = [leaf for item in (*container, *before) for leaf in (item if type(item) is tuple else (item,))]
    if any(isinstance(leaf, _CONTAINERS) for leaf in leaves) or has_objects(leaves):
        return None
    return Items(container, name or f"a {type(container).__name__}")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Variable(Location):
    """A variable that a function closes over.

    Attributes:
        cell: The cell of its value.
        name: The name in reports.
    """

    cell: types.CellType
    name: str = ""

    def get(self) -> Any:
        """The variable's value, or `ABSENT`."""
        try:
            return self.cell.cell_contents
        except ValueError:  # not yet assigned
            return ABSENT

    def put(self, value: Any) -> None:
        """Assign a value, or unassign the variable if that is `ABSENT`."""
        if value is not ABSENT:
            self.cell.cell_contents = value
        elif self.get() is not ABSENT:
            del self.cell.cell_contents

    def is_at(self, owner: Any, key: Any) -> bool:
        """Whether a cell is this one."""
        return owner is self.cell and key is None

    def is_same(self, other: Location) -> bool:
        """Whether another location is this one."""
        return isinstance(other, Variable) and other.cell is self.cell


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _OfTensor(Location):
    """A part of a tensor as an object.

    Attributes:
        tensor: A weak reference to the tensor.
        name: The name in reports.
    """

    tensor: weakref.ref[torch.Tensor]
    name: str = ""

    def hide(self) -> Callable[[], None]:
        """Do nothing: no guard depends on it that calls do not fulfil."""
        return lambda: None

    def is_at(self, owner: Any, key: Any) -> bool:
        """Never: it is no entry."""
        return False

    def is_same(self, other: Location) -> bool:
        """Whether another location is this part of the same tensor."""
        return type(other) is type(self) and self.tensor() is not None and other.tensor() is self.tensor()  # pyright: ignore


class Data(_OfTensor):
    """The memory of a tensor, which ``.data`` shows."""

    __slots__ = ()

    def get(self) -> Any:
        """A tensor that shows the memory, `is_updated`, and whether the tensor requires grad; `ABSENT` if it is gone.

        A trace has no other guard on that, as it reads the memory alone.
        """
        tensor = self.tensor()
        return ABSENT if tensor is None else (memory_of(tensor), is_updated(tensor), tensor.requires_grad)

    def put(self, value: Any) -> None:
        """Give the tensor the memory of another one, and tell autograd if the tensor was updated."""
        tensor = self.tensor()
        if tensor is not None and value is not ABSENT:
            tensor.data, updated, _ = value
            if updated:
                increment_version(tensor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The ``.data`` of a tensor itself, also where others are passed to torch's functions instead of it."""
    if has_torch_function_unary(tensor):
        return handle_torch_function(memory_of, (tensor,), tensor)
    return tensor.data


def is_updated(tensor: torch.Tensor) -> bool:
    """Whether a tensor has been updated in place in a trace under way, as a mode of the trace knows."""
    if has_torch_function_unary(tensor):
        return handle_torch_function(is_updated, (tensor,), tensor)
    return False


class RequiresGrad(_OfTensor):
    """The flag of a tensor that says whether it requires grad."""

    __slots__ = ()

    def get(self) -> Any:
        """The flag, or `ABSENT` if the tensor is gone."""
        tensor = self.tensor()
        return ABSENT if tensor is None else tensor.requires_grad

    def put(self, value: Any) -> None:
        """Set the flag."""
        tensor = self.tensor()
        if tensor is not None and value is not ABSENT:
            tensor.requires_grad_(value)


def are_same(some: Sequence[Location], others: Sequence[Location]) -> bool:
    """Whether locations are the same ones, in the same order."""
    return len(some) == len(others) and all(a.is_same(b) for a, b in zip(some, others, strict=True))


class _Comparable(Protocol):
    def is_same(self, other: Any) -> bool: ...


C = TypeVar("C", bound=_Comparable)


def union(some: Sequence[C], others: Sequence[C]) -> tuple[C, ...]:
    """Locations, or what else can be compared so, and others that are not among them."""
    found = list(some)
    for one in others:
        if not any(one.is_same(known) for known in found):
            found.append(one)
    return tuple(found)


def filled_locations(error: Exception) -> tuple[Location, ...]:
    """The locations that a function has filled where nothing was, if that is all that it has changed."""
    return error.locations or () if isinstance(error, StateChangeError) and error.fills else ()
