"""Snapshots: what has changed since, where, and putting it back."""

from __future__ import annotations

import types
from typing import Any

from pygraph.guards.attribute_dicts import AttributeDicts
from pygraph.guards.contents import SetContents
from pygraph.guards.locations import Item, Items, Variable
from pygraph.guards.snapshot import MISSING, Snapshot


def _cell(value: Any) -> types.CellType:
    return (lambda: value).__closure__[0]  # type: ignore[index]


def _never(name: str, items: list[Any], before: list[Any]) -> None:
    """No list has a location at its end."""


def test_dicts_lists_sets_and_variables_are_put_back() -> None:
    config, items, members = {"scale": 2}, [1, 2], {1}
    cell, variables = _cell(3), {"__name__": "module"}
    snapshot = Snapshot({id(cell): "count"}, AttributeDicts())
    snapshot.add_container("config", config)
    snapshot.cells.append((cell, 3))
    snapshot.variables.append(("fn", variables, "STATE", MISSING))
    assert snapshot.changed_locations(_never) == ()
    assert snapshot.restore() is None

    config["scale"] = cell.cell_contents = 5
    variables["STATE"] = "x"
    locations = snapshot.changed_locations(_never)
    assert not isinstance(locations, str)
    assert [location.name for location in locations] == ["config.scale", "fn.STATE", "count"]
    assert [type(location) for location in locations] == [Item, Item, Variable]
    assert snapshot.restore() == "config.scale"
    assert (config, cell.cell_contents, "STATE" in variables) == ({"scale": 2}, 3, False)

    snapshot.add_container("items", items)
    items.append(3)
    locations = snapshot.changed_locations(_never)
    assert not isinstance(locations, str)
    assert [(type(location), location.name) for location in locations] == [(Items, "items")]
    items.append([4])  # type: ignore[arg-type]
    assert snapshot.changed_locations(_never) == "items"
    assert snapshot.restore() == "items"
    assert items == [1, 2]

    snapshot.contents.append(("members", SetContents(members)))
    members.add(2)
    config["scale"] = 7  # which could be passed
    assert snapshot.changed_locations(_never) == "members"
    config["scale"] = 2
    assert snapshot.restore() == "members"
    assert members == {1}


def test_class_attributes_are_put_back_but_code_may_stay() -> None:
    class Owner:
        count = 1

    snapshot = Snapshot({}, AttributeDicts())
    snapshot.variables.append(("Owner", Owner, "count", 1))
    snapshot.classes.append(("Owner", Owner, frozenset(vars(Owner))))
    assert snapshot.class_attributes() == [(Owner, "count", 1)]
    Owner.helper = len  # type: ignore[attr-defined]
    assert snapshot.changed_locations(_never) == ()
    assert snapshot.restore() is None
    assert "helper" in vars(Owner)
    Owner.cache = {}  # type: ignore[attr-defined]
    assert snapshot.changed_locations(_never) == "Owner.cache"
    assert snapshot.restore() == "Owner.cache"
    assert "cache" not in vars(Owner)


def test_state_of_an_installed_package_is_put_back_but_not_reported() -> None:
    cache: dict[str, int] = {}
    snapshot = Snapshot({}, AttributeDicts())
    snapshot.add_container("package.cache", cache)
    snapshot.mark_packaged(cache)
    cache["a"] = 1
    assert snapshot.changed_locations(_never) == ()
    assert snapshot.restore() is None
    assert cache == {}


def test_a_cleared_snapshot_holds_nothing() -> None:
    config = {"scale": 2}
    snapshot = Snapshot({}, AttributeDicts())
    snapshot.add_container("config", config)
    snapshot.clear()
    config["scale"] = 3
    assert snapshot.restore() is None
    assert config == {"scale": 3}
