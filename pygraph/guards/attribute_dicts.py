"""Guards on the dicts of objects: ``obj.__dict__ = {...}`` gives an object another dict of attributes."""

from __future__ import annotations

import operator
import types
from typing import Any

from pygraph.guards.attributes import attributes_of, dict_slot_of


class AttributeDicts:
    """Objects that must have the dict that they had."""

    def __init__(self) -> None:
        self._all: list[tuple[str, object, dict[str, Any]]] = []
        # Objects and dicts in columns, which are compared faster; and pairs of which only the class can tell.
        self._columns: tuple[list[Any], list[dict[str, Any]], list[tuple[object, dict[str, Any]]]] | None = None

    def add(self, name: str, value: object, attributes: dict[str, Any]) -> None:
        """Guard that these are an object's attributes, if its class lets it have others."""
        if isinstance(dict_slot_of(type(value)), types.GetSetDescriptorType):
            self._all.append((name, value, attributes))
            self._columns = None

    def hold(self) -> bool:
        """Whether all objects have the same dicts."""
        if self._columns is None:
            plain = [(value, attributes) for _, value, attributes in self._all if _is_plain(type(value))]
            others = [(value, attributes) for _, value, attributes in self._all if not _is_plain(type(value))]
            self._columns = [value for value, _ in plain], [attributes for _, attributes in plain], others
        objects, dicts, others = self._columns
        same = all(map(operator.is_, [value.__dict__ for value in objects], dicts))
        return same and all(attributes_of(value) is attributes for value, attributes in others)

    def changed(self) -> str | None:
        """The name of the first object with another dict, or None; nothing of any class is run for it."""
        for name, value, attributes in self._all:
            if attributes_of(value) is not attributes:
                return f"{name or 'an object'}.__dict__"
        return None

    def put_back(self) -> str | None:
        """Give objects their dicts again; the name of the first that had another one, or None."""
        changed = self.changed()
        if changed is not None:
            for _, value, attributes in self._all:
                slot = dict_slot_of(type(value))
                if slot is not None and attributes_of(value) is not attributes:
                    slot.__set__(value, attributes)
        return changed

    def release(self, released: set[int]) -> None:
        """Guard objects of these ids no longer, nor hold them."""
        self._all = [entry for entry in self._all if id(entry[1]) not in released]
        self._columns = None

    def description(self) -> tuple[Any, ...]:
        """All objects with their dicts, as `native/guards.h` reads them."""
        return tuple((value, attributes) for _, value, attributes in self._all)


def _is_plain(cls: type) -> bool:
    """Whether ``__dict__`` of the class's objects reads the dict that they store, and runs nobody's code."""
    first = next(vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base))
    return first is dict_slot_of(cls) and not isinstance(cls.__getattribute__, types.FunctionType)
