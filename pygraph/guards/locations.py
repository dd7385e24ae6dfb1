"""Places of Python state: an entry of a dict or a list, a variable that a function closes over."""

# What lies there is of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Sequence
from typing import Any

from pygraph.guards.storage import delete_item, store_item, stored_item


class Nothing(enum.Enum):
    """What is said to lie where nothing is."""

    ABSENT = "absent"


ABSENT = Nothing.ABSENT


class Location:
    """Where a value lies.

    Attributes:
        name: What reports call it.
    """

    __slots__ = ()
    name: str

    def __call__(self) -> Any:
        """What is there; None if there is nothing any more."""
        value = self.get()
        return None if value is ABSENT else value

    def get(self) -> Any:
        """What is there, or `ABSENT`."""
        raise NotImplementedError

    def put(self, value: Any) -> None:
        """Have something else there, or nothing."""
        raise NotImplementedError

    def is_at(self, owner: Any, key: Any) -> bool:
        """Whether what lies in ``owner``, under ``key`` if that is a container, lies here."""
        raise NotImplementedError

    def is_same(self, other: Location) -> bool:
        """Whether another one is the same location."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Item(Location):
    """An entry of a container.

    Attributes:
        container: A dict, or a list.
        key: Its key or its index.
        name: What reports call it.
    """

    container: Any
    key: Any
    name: str = ""

    def get(self) -> Any:
        """What is there, or `ABSENT`."""
        try:
            return stored_item(self.container, self.key)
        except LookupError:
            return ABSENT

    def put(self, value: Any) -> None:
        """Have something else there, or nothing."""
        if value is not ABSENT:
            store_item(self.container, self.key, value)
        elif self.get() is not ABSENT:
            delete_item(self.container, self.key)

    def is_at(self, owner: Any, key: Any) -> bool:
        """Whether an entry is this one."""
        return owner is self.container and type(key) is type(self.key) and key == self.key

    def is_same(self, other: Location) -> bool:
        """Whether another one is the same location."""
        return isinstance(other, Item) and self.is_at(other.container, other.key)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Variable(Location):
    """A variable that a function closes over.

    Attributes:
        cell: Where its value is.
        name: What reports call it.
    """

    cell: types.CellType
    name: str = ""

    def get(self) -> Any:
        """What it is, or `ABSENT`."""
        try:
            return self.cell.cell_contents
        except ValueError:  # not yet assigned
            return ABSENT

    def put(self, value: Any) -> None:
        """Have it be something else, or nothing."""
        if value is not ABSENT:
            self.cell.cell_contents = value
        elif self.get() is not ABSENT:
            del self.cell.cell_contents

    def is_at(self, owner: Any, key: Any) -> bool:
        """Whether a cell is this one."""
        return owner is self.cell and key is None

    def is_same(self, other: Location) -> bool:
        """Whether another one is the same location."""
        return isinstance(other, Variable) and other.cell is self.cell


def are_same(some: Sequence[Location], others: Sequence[Location]) -> bool:
    """Whether locations are the same ones, in the same order."""
    return len(some) == len(others) and all(a.is_same(b) for a, b in zip(some, others, strict=True))
