"""Locations of Python's state: an entry of a dict or a list, a variable that a function closes over."""

# Values are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from pygraph.errors import StateChangeError
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

    def is_at(self, owner: Any, key: Any) -> bool:
        """Whether this is the location of ``key`` in a container, or of a cell if ``key`` is None."""
        raise NotImplementedError

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
