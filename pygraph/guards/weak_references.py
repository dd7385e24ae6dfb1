"""Weak references: what they refer to, and guards on it that do not keep it alive."""

# Referents are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import weakref
from typing import Any

from pygraph.guards.attributes import attributes_of
from pygraph.guards.contents import Contents

_UNSET = object()


def referent_of(reference: Any) -> Any:
    """The object that a weak reference or a proxy refers to; None if that is no more, or cannot be told."""
    if issubclass(type(reference), weakref.ReferenceType):
        return weakref.ReferenceType.__call__(reference)
    try:
        return reference.__init__.__self__
    except (ReferenceError, AttributeError):
        return None


def life_of(reference: Any) -> Contents:
    """Whether the object that a weak reference or a proxy refers to is alive; it is never another object."""
    return Contents(lambda: (referent_of(reference) is not None,))


class WeakAttributes:
    """The attributes of an object to which only weak references lead; neither it nor its dict is kept alive."""

    def __init__(self, value: object) -> None:
        self._reference = weakref.ref(value)

    def now(self) -> dict[str, Any]:
        """All attributes; none if the object is no more."""
        value = self._reference()
        return {} if value is None else attributes_of(value) or {}

    def number(self) -> Contents:
        """How many attributes there are, as `Contents`."""
        return Contents(lambda: (len(self.now()),))

    def attribute(self, key: str) -> Contents:
        """One attribute, as `Contents`."""
        return Contents(lambda: (self.now().get(key, _UNSET),))


def is_plain_reference(value: object) -> bool:
    """Whether a value is a weak reference without a callback."""
    return type(value) is weakref.ref and value.__callback__ is None
