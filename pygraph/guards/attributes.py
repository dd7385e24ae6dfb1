"""The attributes of an object, in its dict and in its slots, read without running anything of its class."""

# Attributes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from pygraph.guards.contents import Contents

_UNSET = object()


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's dict, if it has one; nothing of the object's class is run for it."""
    slot = dict_slot_of(type(value))
    state = None if slot is None else slot.__get__(value)
    return state if isinstance(state, dict) else None


def dict_slot_of(cls: type) -> types.GetSetDescriptorType | types.MemberDescriptorType | None:
    """The descriptor that reads and sets the dicts of a class's objects; None if they have none."""
    for base in cls.__mro__:
        found = vars(base).get("__dict__")
        if isinstance(found, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return found
    return None


def slots_of(value: Any) -> tuple[dict[str, Any], Contents] | None:
    """The values in an object's slots by name, and as `Contents`; None if its class has no slots."""
    slots = {
        name: slot
        for base in reversed(type(value).__mro__)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType) and not name.startswith("__")
    }
    if not slots:
        return None

    def read() -> list[Any]:
        return [_slot(slot, value) for slot in slots.values()]

    def write(items: Sequence[Any]) -> None:
        for slot, item in zip(slots.values(), items, strict=True):
            if item is not _UNSET:
                slot.__set__(value, item)
            elif _slot(slot, value) is not _UNSET:
                slot.__delete__(value)

    found = zip(slots, read(), strict=True)
    return {name: item for name, item in found if item is not _UNSET}, Contents(read, write)


def _slot(slot: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _UNSET
