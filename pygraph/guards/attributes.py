"""The dicts in which objects have their attributes: whether each object still has the same one."""

from __future__ import annotations

import operator
import types
from typing import Any

from pygraph.contents import attributes_of, dict_slot_of


class AttributeDicts:
    """Objects that must have the dict that they had: ``obj.__dict__ = {...}`` gives an object another one."""

    def __init__(self) -> None:
        self._all: list[tuple[str, object, dict[str, Any]]] = []
        # In columns, which are compared faster; of objects whose class says nothing of its own of how to read it.
        self._columns: tuple[list[Any], list[dict[str, Any]], list[int]] | None = None

    def add(self, name: str, value: object, attributes: dict[str, Any]) -> None:
        """Guard that these are an object's attributes, if its class lets it have others."""
        if isinstance(dict_slot_of(type(value)), types.GetSetDescriptorType):
            self._all.append((name, value, attributes))
            self._columns = None

    def hold(self) -> bool:
        """Whether all objects have the same dicts."""
        if self._columns is None:
            plain = [_is_plain(type(value)) for _, value, _ in self._all]
            self._columns = (
                [value for (_, value, _), is_plain in zip(self._all, plain, strict=True) if is_plain],
                [attributes for (_, _, attributes), is_plain in zip(self._all, plain, strict=True) if is_plain],
                [index for index, is_plain in enumerate(plain) if not is_plain],
            )
        objects, dicts, others = self._columns
        same = all(map(operator.is_, [value.__dict__ for value in objects], dicts))
        return same and all(self._is_same(index) for index in others)

    def changed(self) -> str | None:
        """What has another dict, as a user would write it; None if nothing has."""
        index = next((index for index in range(len(self._all)) if not self._is_same(index)), None)
        return None if index is None else f"{self._all[index][0] or 'an object'}.__dict__"

    def put_back(self) -> str | None:
        """Give objects their dicts again; the name of the first that had another one, or None."""
        changed = self.changed()
        if changed is not None:
            for _, value, attributes in self._all:
                slot = dict_slot_of(type(value))
                assert slot is not None
                if slot.__get__(value) is not attributes:
                    slot.__set__(value, attributes)
        return changed

    def release(self, released: set[int]) -> None:
        """Guard objects of these ids no longer, nor hold them."""
        self._all = [entry for entry in self._all if id(entry[1]) not in released]
        self._columns = None

    def description(self) -> tuple[Any, ...]:
        """All of it, as `native/dispatch.cpp` reads it."""
        return tuple((value, attributes) for _, value, attributes in self._all)

    def _is_same(self, index: int) -> bool:
        _, value, attributes = self._all[index]
        return attributes_of(value) is attributes


def _is_plain(cls: type) -> bool:
    """Whether ``__dict__`` of its objects is what lies in them, and is read without running anybody's code."""
    first = next(vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base))
    return first is dict_slot_of(cls) and not isinstance(cls.__getattribute__, types.FunctionType)
