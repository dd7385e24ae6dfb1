"""Guards as tuples, which `native/guards.h` turns into guards in C++."""

# Guarded containers hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from pygraph.guards.contents import SetContents
from pygraph.guards.dicts import DictGuard
from pygraph.guards.guard_set import GuardSet
from pygraph.guards.storage import underlying
from pygraph.guards.values import has_value, same

NO_GUARDS: tuple[Any, ...] = ((), (), (), (), same, (), ((), (), (), (), bool), (), ())
"""The description of guards that always hold."""


def describe_guards(
    guards: GuardSet,
    variables: Sequence[tuple[dict[Any, Any], Any, Any]] = (),
    items: Sequence[tuple[Any, Any, Any]] = (),
    cells: Sequence[tuple[types.CellType, Any]] = (),
) -> tuple[Any, ...]:
    """Describe guards, each container once.

    Args:
        guards: Guards of an environment.
        variables: Further dicts of modules, keys and values.
        items: Further containers, keys and values.
        cells: Further closed-over variables and their values.

    Returns:
        ``(dicts, lists, cells, items, same, sets, code, attributes, hooks)``.
    """
    dicts = {id(guard.container): guard for guard in guards.dict_guards()}
    more = [(*item, False) for item in items] + [(*variable, True) for variable in variables]
    for container, key, expected, is_namespace in more:
        if isinstance(behind := underlying(container), dict):
            guard = dicts.setdefault(id(behind), DictGuard(behind, is_namespace=is_namespace))
            guard.entries.append((key, expected))
            guard.is_ordered = False
    lists: dict[int, list[Any]] = {}
    others: list[Any] = []
    sets: list[Any] = []
    for container, length in guards.lengths:
        if isinstance(container, list):
            lists.setdefault(id(container), [container, -1, []])[1] = length
    for container, key, expected in (*guards.entries, *items):
        entry = (key, expected, has_value(expected))
        if isinstance(container, SetContents) and type(container.members) is set:
            members = tuple((None, member, has_value(member)) for member in container.before)
            sets.append((container.members, members))
        elif isinstance(container, list):
            lists.setdefault(id(container), [container, -1, []])[2].append(entry)
        elif not isinstance(underlying(container), dict):
            others.append((container, entry))
    return (
        tuple(map(_dict_guard, dicts.values())),
        tuple((container, length, tuple(entries)) for container, length, entries in lists.values()),
        tuple((cell, value, has_value(value)) for cell, value in (*guards.cells, *cells)),
        tuple(others),
        same,
        tuple(sets),
        guards.code.description(),
        guards.attributes.description(),
        guards.hooks.description(),
    )


def _dict_guard(guard: DictGuard) -> tuple[Any, ...]:
    entries = ((key, value, has_value(value)) for key, value in guard.entries)
    absent = ((key,) for key in guard.absent)
    return guard.container, guard.length, (*entries, *absent), guard.is_ordered, guard.is_namespace
