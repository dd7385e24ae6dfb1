"""Guards: which values a trace has read from Python's state, and whether they are still there.

A guard names where a value is stored (an entry of a container, a variable that a function closes over) and the value.
Immutable values are compared by value, all others by identity.
"""

# Guarded containers hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.guards.attribute_dicts import AttributeDicts
from pygraph.guards.code import CodeGuards
from pygraph.guards.contents import Contents
from pygraph.guards.dicts import DictGuard
from pygraph.guards.generated_check import generate_check
from pygraph.guards.locations import FEW_ITEMS, Item, Location, Variable
from pygraph.guards.report_names import entry_name, join
from pygraph.guards.storage import stored_in_cell, stored_item, stored_length, underlying
from pygraph.guards.tensor_hooks import TensorHooks
from pygraph.guards.values import IMMUTABLE, is_number, is_value, same

_MISSING: Any = object()

# Errors of comparisons, which say that something has changed; the last is a set's that another thread changes.
_CHANGED = (LookupError, ValueError, RuntimeError)


class GuardSet:
    """All guards of one environment.

    Args:
        names: Names of objects in reports, by id.

    Attributes:
        code: Guards on functions, classes, and the classes of objects.
        attributes: Guards on which dict has the attributes of an object.
        hooks: Guards on which dicts have the hooks of a tensor.
        entries: Containers (or other objects with ``__getitem__``, as `Contents`), a key, and the value there.
        lengths: Containers and how many items they have.
        cells: Variables that functions close over, and their values.
        absent: Variables that modules do not have: the name of whatever looks them up, the module's dict, the key.
        key_orders: The keys of dicts, by id, in the order in which a function may have iterated over them.
        namespaces: The names of modules, by the id of their dicts.
        container_names: Names of containers in reports, by id.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.code = CodeGuards()
        self.attributes = AttributeDicts()
        self.hooks = TensorHooks()
        self.entries: list[tuple[Any, Any, Any]] = []
        self.lengths: list[tuple[Any, int]] = []
        self.cells: list[tuple[types.CellType, Any]] = []
        self.absent: list[tuple[str, dict[Any, Any], Any]] = []
        self.key_orders: dict[int, tuple[Any, ...]] = {}
        self.namespaces: dict[int, str] = {}
        self.container_names: dict[int, str] = {}
        self._names = names
        self._check: Callable[[], bool] | None = None

    def add_contents(self, contents: Any) -> None:
        """Guard what `Contents`, or another object whose item 0 tells it, compares."""
        self.entries.append((contents, 0, True))

    # -- whether they hold --------------------------------------------------------------------------------------------

    def hold(self) -> bool:
        """Whether every value that was read is still there."""
        check = self._check
        if check is None:
            check = self._check = generate_check(
                self.code, self.attributes, self.hooks, self.dict_guards(), self.lengths, self.entries, self.cells
            )
        try:
            return check()
        except _CHANGED:
            return False

    def are_empty(self) -> bool:
        """Whether no value of a container or a variable is guarded."""
        return not (self.lengths or self.entries or self.cells)

    def changed(self) -> str | None:
        """The name of the first thing that has another value now, as a user would write it; None if it has none."""
        code = self.code.changed() or self.attributes.changed() or self.hooks.changed()
        if code is not None:
            return code
        try:
            return next(self._changes(), None)
        except _CHANGED:
            return None

    def _changes(self) -> Iterator[str | None]:
        """The names of all that has changed, None for what has no name."""
        for name, variables, key in self.absent:
            if key in variables:
                yield join(name, key)
        for container, key, expected in self.entries:
            module = self.namespaces.get(id(container))
            if module is not None and _differs(container.get(key, _MISSING), expected):
                yield f"{module}.{key}"
        for container, length in self.lengths:
            if stored_length(container) != length:
                yield self.container_names.get(id(container))
        for container, key, expected in self.entries:
            name = self.container_names.get(id(container))
            if name is not None and _differs(stored_item(container, key), expected):
                yield entry_name(name, key, self._names)
        for cell, expected in self.cells:
            if _differs(stored_in_cell(cell), expected):
                yield self._names.get(id(cell))

    def changed_numbers(self) -> list[Location]:
        """Where there are other numbers now, or tuples of numbers."""
        return self._changed(lambda now, expected: is_number(expected) and is_number(now) and _differs(now, expected))

    def replaced_containers(self) -> list[Location]:
        """Where there are other lists, tuples or dicts of tensors now than there were, as the batch of a trainer."""
        return self._changed(lambda now, expected: now is not expected and _holds_tensors(expected, now))

    def _changed(self, has_changed: Callable[[Any, Any], bool]) -> list[Location]:
        """The locations whose values now are others, by what there was."""
        found: list[Location] = []
        for container, key, expected in self.entries:
            if isinstance(container, (dict, list)) and has_changed(Item(container, key).get(), expected):
                name = self.container_names.get(id(container)) or self.namespaces.get(id(container)) or ""
                found.append(Item(container, key, entry_name(name, key, self._names)))
        for cell, expected in self.cells:
            if has_changed(stored_in_cell(cell), expected):
                found.append(Variable(cell, self._names.get(id(cell), "a closed-over variable")))
        return found

    def has(self, location: Location) -> bool:
        """Whether anything in the container of a location is guarded, or its variable."""
        if isinstance(location, Variable):
            return any(cell is location.cell for cell, _ in self.cells)
        return isinstance(location, Item) and any(entry[0] is location.container for entry in self.entries)

    def may_hold_again(self) -> bool:
        """Whether all that differs now are immutable values (a flag, a number), which may be set back.

        Where an object is another one, keeping a compiled entry for the old one would only keep that alive.
        """
        try:
            if any(stored_length(container) != length for container, length in self.lengths):
                return False
            cells = ((cell.cell_contents, expected) for cell, expected in self.cells)
            items = ((stored_item(container, key), expected) for container, key, expected in self.entries)
            if any(isinstance(container, Contents) and not container[key] for container, key, _ in self.entries):
                return False
            return all(
                now is expected or (is_value(now) and is_value(expected))
                for now, expected in itertools.chain(cells, items)
            )
        except _CHANGED:
            return False

    # -- what is guarded ----------------------------------------------------------------------------------------------

    def dict_guards(self) -> list[DictGuard]:
        """All guards on dicts, grouped by dict."""
        guards: dict[int, DictGuard] = {}

        def of(container: dict[Any, Any]) -> DictGuard:
            return guards.setdefault(id(container), DictGuard(container))

        for container, length in self.lengths:
            if isinstance(container, dict):
                of(container).length = length
        for container, key, expected in self.entries:
            if isinstance(behind := underlying(container), dict):
                of(behind).entries.append((key, expected))
        for _, variables, key in self.absent:
            of(variables).absent.append(key)
        for guard in guards.values():
            keys = self.key_orders.get(id(guard.container), ())
            guard.is_ordered = len(keys) == len(guard.entries) > 1 and all(
                key is mine for key, (mine, _) in zip(keys, guard.entries, strict=True)
            )
            guard.is_namespace = id(guard.container) in self.namespaces
        return list(guards.values())

    def items(self) -> list[tuple[Any, Any, Any]]:
        """Dicts and lists, of whatever class, with a key and the value there."""
        return [entry for entry in self.entries if isinstance(entry[0], (dict, list))]

    def locations(self, value: object) -> list[Item | Variable]:
        """Where this very object was found, as far as another one can be stored there."""
        items = [Item(container, key) for container, key, found in self.entries if found is value]
        cells = {id(cell): cell for cell, found in self.cells if found is value}  # several functions may share one
        return [*items, *map(Variable, cells.values())]

    # -- guarding less ------------------------------------------------------------------------------------------------

    def release_objects(self, released: set[int]) -> None:
        """Drop the guards on objects of these ids."""
        self.entries = [entry for entry in self.entries if id(entry[2]) not in released]
        self.cells = [cell for cell in self.cells if id(cell[1]) not in released]
        self.container_names.clear()
        self._check = None

    def stop_holding(self, released: set[int]) -> None:
        """Drop the guards on the classes and dicts of objects of these ids, which would keep the objects alive."""
        self.code.release(released)
        self.attributes.release(released)
        self.hooks.release(released)

    def release_locations(self, locations: Iterable[Location]) -> None:
        """Drop the guards on what is stored in these locations."""
        for location in locations:
            self.entries = [entry for entry in self.entries if not location.is_at(entry[0], entry[1])]
            self.cells = [cell for cell in self.cells if not location.is_at(cell[0], None)]
            self.lengths = [guard for guard in self.lengths if not location.is_of_all(guard[0])]
        self._check = None

    def narrow_to_modes(self) -> None:
        """Guard only which modules there are and whether they are in training."""
        self.entries = [entry for entry in self.entries if _is_mode(entry[1], entry[2])]
        self.cells = [cell for cell in self.cells if issubclass(type(cell[1]), torch.nn.Module)]
        self.lengths.clear()
        self.absent.clear()
        self.container_names.clear()
        self.code.clear()
        self.attributes = AttributeDicts()
        self.hooks = TensorHooks()
        self._check = None


def _differs(now: Any, expected: Any) -> bool:
    return now is not expected and not same(now, expected)


def _is_mode(key: Any, expected: Any) -> bool:
    return (key == "training" and issubclass(type(expected), bool)) or issubclass(type(expected), torch.nn.Module)


def _holds_tensors(*containers: Any) -> bool:
    """Whether values are containers of one kind that hold few tensors, and else only numbers and texts."""
    kinds = {type(one) for one in containers}
    if len(kinds) > 1 or kinds.isdisjoint((list, tuple, dict)):
        return False
    for container in containers:
        leaves = pytree.tree_leaves(container)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not 0 < len(leaves) <= FEW_ITEMS or not all(isinstance(one, (torch.Tensor, *IMMUTABLE)) for one in leaves):
            return False
        if not tensors or any(tensor.is_leaf and tensor.requires_grad for tensor in tensors):
            return False  # parameters are what they are, in whatever list
    return True
