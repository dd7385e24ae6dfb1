"""A snapshot of Python's state before a trace: what has changed since, and putting it back.

A trace runs the function, and a traced tensor must never be left in a module. What an installed package remembers (in
a cache that knows fake tensors now) is put back as well, but is not reported as a change of the function's.
"""

# Containers hold items of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.guards.attribute_dicts import AttributeDicts
from pygraph.guards.contents import Contents
from pygraph.guards.locations import Item, Location, Variable, items_of
from pygraph.guards.memos import Remembered
from pygraph.guards.objects import holds_tensors
from pygraph.guards.report_names import changed_entry, entry_name, join
from pygraph.guards.storage import (
    changed_keys,
    holds_the_very,
    is_in_order,
    is_unchanged,
    store,
    stored_copy,
    stored_in_cell,
)
from pygraph.guards.values import is_value
from pygraph.ir.constants import IMMUTABLE

#: The value of a variable that a module does not have.
MISSING: Any = object()

_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)

# The attribute of GradScaler with its records of a step, empty between steps. Checked with torch 2.11 and 2.13.
SCALER_RECORDS = "_per_optimizer_states"


# What Dynamo notes on parameters that a branch or a loop (torch.cond) reads while it is traced; torch 2.11, not 2.13.
_OF_DYNAMO = "_dynamo_static_input_type"


class Snapshot:
    """Copies of the state that a function can reach.

    Args:
        names: Names of objects in reports, by id.
        attributes: The dicts that objects have their attributes in.

    Attributes:
        containers: Dicts and lists: their name in reports, and a copy.
        contents: The contents of other objects, with a name in reports.
        variables: Variables of modules and attributes of classes: a name, the module's dict or the class, key, value.
        classes: Classes: a name in reports, and which attributes they have.
        cells: Variables that functions close over, and their values.
        scaler_records: The attributes of gradient scalers, with the empty records of a step.
        memos: The names of functions with a cache of ``functools``, and what they remember.
    """

    def __init__(self, names: dict[int, str], attributes: AttributeDicts) -> None:
        self.containers: list[tuple[str, Any, Any]] = []
        self.contents: list[tuple[str, Contents]] = []
        self.variables: list[tuple[str, Any, str, Any]] = []
        self.classes: list[tuple[str, type, frozenset[str]]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.scaler_records: list[tuple[dict[str, Any], Any]] = []
        self.memos: list[tuple[str, Remembered]] = []
        self._names, self._attributes = names, attributes
        self._packaged: set[int] = set()

    def add_container(self, name: str, container: Any) -> None:
        """Copy a dict or a list."""
        self.containers.append((name, container, stored_copy(container)))

    def mark_packaged(self, owner: object) -> None:
        """Say that a container, contents, a module's dict or a class belongs to an installed package.

        What is filled there is a memo of the package, and no change.
        """
        self._packaged.add(id(owner))

    def is_packaged(self, owner: object) -> bool:
        """Whether a container, contents, a module's dict or a class belongs to an installed package."""
        return id(owner) in self._packaged

    def clear(self) -> None:
        """Drop all copies; nothing can be restored after it."""
        self.containers, self.contents, self.variables, self.classes = [], [], [], []
        self.cells, self.scaler_records, self.memos, self._packaged = [], [], [], set()

    def class_attributes(self) -> list[tuple[type, str, Any]]:
        """Classes with the name of an attribute and its value."""
        return [(owner, key, value) for _, owner, key, value in self.variables if isinstance(owner, type)]

    # -- what has changed ---------------------------------------------------------------------------------------------

    def changed_locations(
        self, grown: Callable[[str, list[Any], list[Any]], Location | None]
    ) -> tuple[Location, ...] | str:
        """Where another value is stored now; or the name of something that has changed and is in no such location.

        Args:
            grown: Returns, for the name of a list, the list and its items from before, the location of new items at
                its end; None if it has changed in another way.
        """
        found: list[Location] = []
        for name, contents in self.contents:
            if id(contents) not in self._packaged and not contents[0]:
                deque = contents.container
                location = None if deque is None else items_of(name, deque, contents.before)
                if location is None:
                    return name or "an object"
                found.append(location)
        elsewhere = self._changed_elsewhere()
        if elsewhere is not None:
            return elsewhere
        for name, container, before in self._changed_containers():
            if isinstance(container, list):
                location = grown(name, container, before) or items_of(name, container, before)
                if location is None:
                    return changed_entry(name, container, before, self._names)
                found.append(location)
                continue
            if not is_in_order(container, before):
                return changed_entry(name, container, before, self._names)
            keys = changed_keys(container, before)
            odd = [key for key in keys if not isinstance(key, IMMUTABLE)]
            if odd:  # the class or a tensor of a trace, perhaps
                return entry_name(name, odd[0], self._names)
            found += [Item(container, key, entry_name(name, key, self._names)) for key in keys]
        for name, owner, key, before in self.variables:
            now = _lookup(owner, key)
            if now is before or self._is_memo(owner, before, now) or (_is_code(now) and before is MISSING):
                continue
            if isinstance(owner, type):
                return join(name, key)
            found.append(Item(owner, key, join(name, key)))
        cells = [cell for cell, before in self.cells if stored_in_cell(cell) is not before]
        return (*found, *(Variable(cell, self._name_of(cell)) for cell in cells))

    def _changed_elsewhere(self) -> str | None:
        """The name of the first change that is neither of a container, contents nor a variable."""
        attributes = (
            join(name, key)
            for name, cls, keys in self.classes
            if id(cls) not in self._packaged
            for key in _new_attributes(cls, keys)
        )
        return self._attributes.changed() or next(attributes, None)

    def _changed_containers(self) -> Iterator[tuple[str, Any, Any]]:
        for name, container, before in self.containers:
            if isinstance(container, dict) and _OF_DYNAMO in container and _OF_DYNAMO not in before:
                del container[_OF_DYNAMO]
            if not (is_unchanged(container, before) or self._fills_memos(container, before)):
                yield name, container, before

    def _fills_memos(self, container: Any, before: Any) -> bool:
        """Whether a container of a package differs from a copy of it by what the package has remembered alone."""
        if id(container) not in self._packaged or not isinstance(container, dict):
            return False
        now = stored_copy(container)
        keys = changed_keys(container, before)
        return all(self._is_memo(container, before.get(key), now.get(key)) for key in keys)

    def _is_memo(self, owner: object, before: Any, now: Any) -> bool:
        """Whether a package has stored something where nothing was, in which there is no tensor of the trace."""
        if id(owner) not in self._packaged or not (before is None or before is MISSING):
            return False
        return not any(isinstance(leaf, torch.Tensor) or holds_tensors(leaf) for leaf in pytree.tree_leaves(now))

    def _name_of(self, cell: types.CellType) -> str:
        return self._names.get(id(cell), "a closed-over variable")

    # -- putting it back ----------------------------------------------------------------------------------------------

    def restore(self) -> str | None:
        """Undo every change; the name of the first thing that had changed, or None.

        Gradients are not among this, see `Environment.restore_gradients`.
        """
        changed = self._attributes.put_back()
        for scaler, records in self.scaler_records:
            if not scaler[SCALER_RECORDS]:  # GradScaler.update has replaced it by another one
                records.clear()
                scaler[SCALER_RECORDS] = records
        for restored in (
            self._restored_containers, self._restored_contents, self._restored_variables, self._restored_classes,
            self._restored_cells,
        ):  # fmt: skip
            for name in restored():
                changed = changed or name
        return changed

    def forget_remembered(self, *, every: bool) -> str | None:
        """Have functions forget objects that they have come to remember; says which one did, None if none did.

        Args:
            every: Whether values are forgotten as well, as after a change of state: it may be what such a function does
                where it does not remember yet, and is to do when the call runs as it is.
        """

        def is_lost(result: Any) -> bool:
            return every or not is_value(result)

        found = [name for name, memo in self.memos if memo.forget_others(is_lost)]
        return f"what {found[0]} remembers" if found else None

    def _restored_containers(self) -> Iterator[str | None]:
        """Put dicts and lists back; yields the names of what had changed, None for what is not reported."""
        for name, container, before in self.containers:
            if not holds_the_very(container, before):
                is_change = not (is_unchanged(container, before) or self._fills_memos(container, before))
                yield changed_entry(name, container, before, self._names) if is_change else None
                store(container, before)

    def _restored_contents(self) -> Iterator[str | None]:
        for name, contents in self.contents:
            if contents.restore() and id(contents) not in self._packaged:
                yield name or "an object"

    def _restored_variables(self) -> Iterator[str | None]:
        for name, owner, key, before in self.variables:
            now = _lookup(owner, key)
            # Code that is imported when it is first needed may stay.
            if now is not before and not (_is_code(now) and (before is None or before is MISSING)):
                is_memo = self._is_memo(owner, before, now)
                _put(owner, key, before)
                yield None if is_memo else join(name, key)

    def _restored_classes(self) -> Iterator[str | None]:
        for name, cls, keys in self.classes:
            for key in _new_attributes(cls, keys):
                _put(cls, key, MISSING)
                yield None if id(cls) in self._packaged else join(name, key)

    def _restored_cells(self) -> Iterator[str | None]:
        for cell, before in self.cells:
            if stored_in_cell(cell) is not before:
                cell.cell_contents = before
                yield self._name_of(cell)


def _is_code(value: Any) -> bool:
    return issubclass(type(value), _CODE)


def _new_attributes(cls: type, keys: frozenset[str]) -> list[str]:
    """The attributes that a class did not have, but for code and for what the interpreter stores."""
    return [key for key in vars(cls).keys() - keys if not key.startswith("__") and not _is_code(vars(cls)[key])]


def _lookup(owner: Any, key: str) -> Any:
    return (vars(owner) if isinstance(owner, type) else owner).get(key, MISSING)


def _put(owner: Any, key: str, value: Any) -> None:
    """Set a variable of a module or an attribute of a class, or delete it; a metaclass is not asked."""
    if not isinstance(owner, type):
        if value is MISSING:
            del owner[key]
        else:
            owner[key] = value
    elif value is MISSING:
        type.__delattr__(owner, key)
    else:
        type.__setattr__(owner, key, value)
