"""Layouts: all of an object that was taken apart but its tensors, numbers and other leaves."""

# Attributes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Leaf(NamedTuple):
    """A value that is a leaf of the call."""


class Same(NamedTuple):
    """An object, a dict or a list that came before, or a weak reference to one.

    Attributes:
        number: Its number among those of the call.
        is_weak: Whether it is a weak reference.
    """

    number: int
    is_weak: bool


class Array(NamedTuple):
    """A NumPy array, whose memory is a leaf.

    Attributes:
        number: Its number among the objects of the call.
        dtype: Its dtype, as NumPy writes it.
    """

    number: int
    dtype: str


class Numbers(NamedTuple):
    """A list of numbers, of which a tensor on the host is a leaf.

    Attributes:
        number: Its number among the objects of the call.
        cls: Their class, ``int`` or ``float``.
    """

    number: int
    cls: type


class Unread(NamedTuple):
    """A value that is not expected to be read: another one makes no other call.

    Attributes:
        number: Its number among the objects of the call.
        cls: Its class.
    """

    number: int
    cls: type


class Growing(NamedTuple):
    """A list to which its function appends, and of which it reads nothing.

    Attributes:
        number: Its number among the objects of the call.
    """

    number: int


class Node(NamedTuple):
    """An object, a dict, a list, a deque or a tuple.

    Attributes:
        cls: Its class.
        names: The names of its attributes, which are the first parts.
        keys: The keys of its items, which are the last parts, each with its type; numbers in lists, deques and tuples.
        parts: What they are.
        made_with: The greatest length of a deque, and what makes the missing values of a dict.
    """

    cls: type
    names: tuple[str, ...]
    keys: tuple[Any, ...]
    parts: tuple[Part, ...]
    made_with: Any = None


Part = Leaf | Same | Array | Numbers | Unread | Growing | Node


class Layout:
    """All of an object but its leaves.

    Args:
        root: The object.
        classes: The classes of objects in it, which are leaves too: their code is part of what a function reads.
        unread: The classes of values in it that are not expected to be read.
    """

    __slots__ = ("_hash", "_paths", "_positions", "classes", "root", "unread")

    def __init__(self, root: Part, classes: tuple[type, ...], unread: tuple[type, ...] = ()) -> None:
        self.root, self.classes, self.unread = root, classes, unread
        self._hash = hash((root, classes))
        self._paths: tuple[str, ...] | None = None
        self._positions: dict[str, int] | None = None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Layout and self._hash == other._hash and self.root == other.root)

    def __repr__(self) -> str:
        return f"Layout of {', '.join(cls.__qualname__ for cls in self.classes) or 'an array'}"

    @property
    def paths(self) -> tuple[str, ...]:
        """The endings of the names of its leaves, after that of the object, as ``.x`` or ``.items['a']``."""
        if self._paths is None:
            several = len(self.classes) > 1
            own = [f".__class__ ({cls.__qualname__})" if several else ".__class__" for cls in self.classes]
            self._paths = (*own, *_paths("", self.root))
        return self._paths

    @property
    def positions(self) -> dict[str, int]:
        """The positions of its leaves, by the endings of their names."""
        if self._positions is None:
            self._positions = {path: position for position, path in enumerate(self.paths)}
        return self._positions


def _paths(path: str, part: Part) -> Iterator[str]:
    if isinstance(part, (Leaf, Array, Numbers)):
        yield path
    elif isinstance(part, Node):
        for name, inner in zip([*names_of(part)], part.parts, strict=True):
            yield from _paths(path + name, inner)


def names_of(node: Node) -> Iterator[str]:
    """The endings of the names of an object's parts, after its own."""
    yield from (f".{name}" for name in node.names)
    yield from (f"[{key[1]!r}]" if isinstance(key, tuple) else f"[{key}]" for key in node.keys)
