"""Guards as generated code, against guards as data: both must notice the same changes."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import pytest

from pygraph.guards.contents import contents_of
from pygraph.guards.guard_set import GuardSet
from pygraph.guards.locations import Item, Items, Variable


class _Forbidding(dict[Any, Any]):
    """A dict whose own methods must not be run by guards."""

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError(key)

    __len__ = __iter__ = __contains__ = __getitem__  # type: ignore[assignment]


def _cell(value: Any) -> types.CellType:
    return (lambda: value).__closure__[0]  # type: ignore[index]


Change = Callable[[Any], object]

# How a container is made, a key, a change, how it is undone, and what reports call it.
CONTAINERS: dict[str, tuple[Callable[[], Any], Any, Change, Change, str]] = {
    "dict": (lambda: {"a": 1}, "a", lambda c: c.update(a=2), lambda c: c.update(a=1), "config.a"),
    "dict, longer": (lambda: {"a": 1}, "a", lambda c: c.update(b=1), lambda c: c.pop("b"), "config"),
    "dict, key missing": (lambda: {"a": 1}, "a", lambda c: c.clear(), lambda c: c.update(a=1), "config"),
    "ordered dict": (
        lambda: collections.OrderedDict(a=1), "a", lambda c: c.update(a=2), lambda c: c.update(a=1), "config.a",
    ),
    "dict of a derived class": (
        lambda: _Forbidding(a=1), "a", lambda c: dict.update(c, a=2), lambda c: dict.update(c, a=1), "config.a",
    ),
    "list": (lambda: [1], 0, lambda c: c.__setitem__(0, 2), lambda c: c.__setitem__(0, 1), "config.0"),
    "list, shorter": (lambda: [1], 0, lambda c: c.clear(), lambda c: c.append(1), "config"),
    "a key that is no literal": (
        lambda: {(1, 2): 1}, (1, 2), lambda c: c.update({(1, 2): 2}), lambda c: c.update({(1, 2): 1}), "config[(1, 2)]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_change_of_a_container_is_seen_and_may_be_undone(kind: str) -> None:
    make, key, change, undo, name = CONTAINERS[kind]
    container = make()
    guards = GuardSet({})
    guards.entries.append((container, key, 1))
    guards.lengths.append((container, 1))
    guards.container_names[id(container)] = "config"
    dicts = guards.dict_guards()
    assert len(dicts) == isinstance(container, dict)
    for _ in range(2):
        assert guards.hold()
        assert guards.changed() is None
        assert all(guard.holds() for guard in dicts)
        change(container)
        assert not guards.hold()
        assert guards.changed() == name
        assert not any(guard.holds() for guard in dicts)
        undo(container)


@pytest.mark.parametrize(
    ("expected", "equal", "other"), [(True, True, False), (None, None, 0), ((1, 2.0), (1, 2.0), 1)]
)
def test_values_are_compared_by_value_and_objects_by_identity(expected: Any, equal: Any, other: Any) -> None:
    cell = _cell(expected)
    guards = GuardSet({id(cell): "flag"})
    guards.cells.append((cell, expected))
    assert guards.hold()
    cell.cell_contents = equal
    assert guards.hold()
    cell.cell_contents = other
    assert not guards.hold()
    assert guards.changed() == "flag"
    assert guards.may_hold_again()
    cell.cell_contents = []
    assert not guards.may_hold_again()
    del cell.cell_contents
    assert not guards.hold()


def test_absent_variables_and_the_order_of_keys_are_guarded() -> None:
    variables: dict[str, Any] = {"__name__": "module"}
    items = {"a": 1, "b": 2}
    guards = GuardSet({})
    guards.absent.append(("fn", variables, "helper"))
    guards.entries += [(items, "a", 1), (items, "b", 2)]
    guards.key_orders[id(items)] = ("a", "b")
    assert guards.hold()
    items["a"] = items.pop("a")
    assert not guards.hold()
    items["b"] = items.pop("b")
    assert guards.hold()
    variables["helper"] = len
    assert not guards.hold()
    assert guards.changed() == "fn.helper"


def test_guards_that_are_released_are_compared_no_more() -> None:
    value = object()
    items: dict[str, Any] = {"a": value, "lr": 1}
    cell = _cell(value)
    guards = GuardSet({})
    guards.entries += [(items, "a", value), (items, "lr", 1)]
    guards.cells.append((cell, value))
    assert guards.hold()
    where = guards.locations(value)
    assert [type(location) for location in where] == [Item, Variable]
    assert [location() for location in where] == [value, value]
    guards.release_locations([Item(items, "lr")])
    items["lr"] = 2
    assert guards.hold()
    guards.release_locations(where[1:])
    cell.cell_contents = None
    assert guards.hold()
    guards.release_objects({id(value)})
    items["a"] = None
    assert guards.hold()
    assert guards.are_empty()


def test_guards_on_all_items_that_are_released() -> None:
    items, others, last = [1, 2], [3], collections.deque([4])
    guards = GuardSet({})
    guards.entries += [(items, 0, 1), (items, 1, 2), (others, 0, 3)]
    guards.lengths += [(items, 2), (others, 1)]
    contents = contents_of(last, 0)
    guards.add_contents(contents)
    assert guards.hold()
    guards.release_locations([Items(items), Items(last)])
    items.append(5)
    last.clear()
    assert guards.hold()
    others.append(6)
    assert not guards.hold()


def test_no_code_of_a_class_is_run_where_guards_are_released() -> None:
    """A dict with attributes as keys makes what it is asked for."""

    class Attributes(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            self[name] = Attributes()
            return self[name]

    attributes, items = Attributes(a=1), [2]
    guards = GuardSet({})
    guards.entries += [(attributes, "a", 1), (items, 0, 2)]
    guards.lengths += [(attributes, 1), (items, 1)]
    guards.release_locations([Items(items)])
    assert [*attributes] == ["a"]
    items.clear()
    assert guards.hold()
