"""References: what users call each kind, and that clearing one leaves all beside it."""

from __future__ import annotations

import collections
import queue
import types
from collections.abc import Callable
from typing import Any

import pytest

from pygraph.guards.storage import underlying
from pygraph.tracing.reference_clearing import clear_reference
from pygraph.tracing.references import Reference, name_of


class Item:
    """An object that is referred to."""


class Slotted:
    """An object with an attribute in a slot, and others in its dict."""

    __slots__ = ("__dict__", "slot")


Case = tuple[Any, Callable[[Any], list[Any]], str | None]


def cases(item: Item) -> dict[str, Case]:
    """By kind: an object that refers to ``item`` and to 1, a function of what it still refers to, and the name."""
    owner, error, slotted = Item(), ValueError(item, 1), Slotted()
    vars(owner).update(x=item, y=1)
    slotted.slot, slotted.other = item, 1  # pyright: ignore
    entries: queue.SimpleQueue[Any] = queue.SimpleQueue()
    entries.put(item)
    entries.put(1)
    return {
        "dict": ({"x": item, "y": 1}, lambda d: list(d.values()), "a dict['x']"),
        "list": ([item, 1, item], list, "an item of a list"),
        "deque": (collections.deque([item, 1]), list, "an item of a deque"),
        "set": ({item, 1}, list, "an item of a set"),
        "object": (owner, lambda o: list(vars(o).values()), "a Item.x"),
        "slots": (slotted, lambda s: [s.other, *([s.slot] if hasattr(s, "slot") else [])], "a Slotted.slot"),
        "error": (error, lambda e: [1, *e.args], None),
        "queue": (entries, lambda q: [q.get_nowait() for _ in range(q.qsize())], None),
    }


@pytest.mark.parametrize("kind", list(cases(Item())))
def test_clearing_removes_the_item_and_nothing_else(kind: str) -> None:
    item = Item()
    referrer, left, name = cases(item)[kind]
    if name is not None:
        assert name_of(Reference(referrer, item)) == name
    assert clear_reference(Reference(referrer, item))
    assert left(referrer) == [1]


def test_a_closed_over_variable_is_named_and_cleared() -> None:
    item = Item()

    def function() -> object:
        return item

    assert function.__closure__ is not None
    reference = Reference(function.__closure__[0], item)
    assert name_of(reference) == f"item of {function.__qualname__}"
    assert clear_reference(reference)
    with pytest.raises(NameError):
        function()


def test_an_entry_of_a_global_dict_is_named_by_its_variable() -> None:
    module: Any = types.ModuleType("mine")
    module.table = {"x": (item := Item())}
    assert name_of(Reference(module.table, item)) == "mine.table['x']"


def test_an_attribute_of_a_class_is_cleared_by_the_class() -> None:
    item = Item()
    cls: Any = type("Holder", (), {"x": item})
    assert clear_reference(Reference(underlying(vars(cls)), item))
    assert not hasattr(cls, "x")


def test_a_tuple_cannot_be_cleared() -> None:
    item = Item()
    assert not clear_reference(Reference((item,), item))
