"""Guards as generated code: one straight-line Python function that compares all of them.

A loop over guards would cost three times as much per call. The path in C++ compares the same guards as
`native_description` describes them.
"""

# Guarded containers hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from pygraph.guards.attribute_dicts import AttributeDicts
from pygraph.guards.code import CodeGuards
from pygraph.guards.dicts import DictGuard
from pygraph.guards.storage import is_derived, stored_item, stored_length, underlying
from pygraph.guards.tensor_hooks import TensorHooks
from pygraph.guards.values import has_value, same
from pygraph.guards.versions import Versions

# To read the version of a dict takes as long as to look up a few items.
_FEW = 4


def generate_check(
    code: CodeGuards,
    attributes: AttributeDicts,
    hooks: TensorHooks,
    dicts: Sequence[DictGuard],
    lengths: Sequence[tuple[Any, int]],
    entries: Sequence[tuple[Any, Any, Any]],
    cells: Sequence[tuple[types.CellType, Any]],
) -> Callable[[], bool]:
    """Generate the function that tells whether all guards hold.

    Args:
        code: Guards on functions and classes.
        attributes: Guards on the dicts of objects.
        hooks: Guards on the hooks of tensors.
        dicts: Guards on dicts.
        lengths: Containers and their lengths; those of dicts are in ``dicts``.
        entries: Containers, keys and values; those of dicts are in ``dicts``.
        cells: Closed-over variables and their values.

    Returns:
        The function. It may raise LookupError, ValueError or RuntimeError, which also say that something has changed.
    """
    writer = _Writer()
    versioned = [guard for guard in dicts if guard.is_namespace and len(guard.entries) + len(guard.absent) > _FEW]
    versions = Versions(versioned, code.types, code.classes_hold)
    for check in (versions.hold, code.functions_hold, attributes.hold, hooks.hold):
        writer.fail_if(f"not {writer.bind(check)}()")
    for guard in dicts:
        if guard not in versioned or not versions.has_dicts:
            writer.compare_dict(guard)
    for container, length in lengths:
        if not isinstance(container, dict):
            writer.compare_length(container, length)
    for container, key, expected in entries:
        if not isinstance(underlying(container), dict):
            writer.compare_item(container, key, expected)
    for cell, expected in cells:
        writer.compare(f"{writer.bind(cell)}.cell_contents", expected)
    return writer.function()


class _Writer:
    """The lines of a function that returns False where a comparison fails, and the objects that it refers to."""

    def __init__(self) -> None:
        self._lines = ["def check():"]
        self._scope: dict[str, Any] = {"same": same, "stored_item": stored_item, "stored_length": stored_length}

    def bind(self, value: Any) -> str:
        """A name by which the function refers to an object."""
        name = f"v{len(self._scope)}"
        self._scope[name] = value
        return name

    def fail_if(self, condition: str) -> None:
        """Return False where a condition is true."""
        self._lines.append(f"    if {condition}: return False")

    def compare(self, expression: str, expected: Any) -> None:
        """Return False unless an expression is the expected object, or an equal immutable value."""
        if expected is None or expected is True or expected is False:
            self.fail_if(f"{expression} is not {expected}")
            return
        name = self.bind(expected)
        if has_value(expected):
            self.fail_if(f"{expression} is not {name} and not same({expression}, {name})")
        else:
            self.fail_if(f"{expression} is not {name}")

    def compare_length(self, container: Any, length: int) -> None:
        """Return False unless a container has so many items."""
        self._compare_length(self.bind(container), length, is_derived(container))

    def _compare_length(self, name: str, length: int, derived: bool) -> None:
        if derived:
            self.fail_if(f"stored_length({name}) != {length}")
        else:
            self.fail_if(f"len({name}) != {length}" if length else name)

    def compare_item(self, container: Any, key: Any, expected: Any) -> None:
        """Return False unless a container that is no dict has the expected item."""
        name, index = self.bind(container), self._index(key)
        self.compare(f"stored_item({name}, {index})" if is_derived(container) else f"{name}[{index}]", expected)

    def compare_dict(self, guard: DictGuard) -> None:
        """Return False unless all guards on one dict hold."""
        name = self.bind(guard.container)
        derived = is_derived(guard.container)
        if guard.length >= 0:
            self._compare_length(name, guard.length, derived)
        for key, expected in guard.entries:
            index = self._index(key)
            self.compare(f"stored_item({name}, {index})" if derived else f"{name}[{index}]", expected)
        if guard.is_ordered and derived:
            self.fail_if(f"not {self.bind(guard.is_in_order)}()")
        elif guard.is_ordered:
            self.fail_if(f"[*{name}] != {self.bind([key for key, _ in guard.entries])}")
        if guard.absent:
            contains = self.bind(functools.partial(dict.__contains__, guard.container))
            self.fail_if(f"True in map({contains}, {self.bind(guard.absent)})")

    def _index(self, key: Any) -> str:
        return repr(key) if type(key) in (str, int) else self.bind(key)

    def function(self) -> Callable[[], bool]:
        """Compile the lines."""
        self._lines.append("    return True")
        exec("\n".join(self._lines), self._scope)  # the text is made of names and literals from above only
        return self._scope["check"]
