"""Objects with tensors that a call moves from one attribute or variable to another.

Calls that take and return what lies there make such an object anew, from its leaves. That cannot be told as long as it
stays where it was. Where it goes elsewhere, or what it holds is put into another one, others that refer to it would see
that it is another object.
"""

# Attributes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pygraph.errors import TraceError
from pygraph.guards.argument_containers import is_container
from pygraph.guards.locations import Items, Location
from pygraph.guards.objects import has_parts
from pygraph.ir.value_keys import attributes_of


def check_moves(locations: Sequence[Location], before: Sequence[Any], after: Sequence[Any]) -> None:
    """Refuse a call that moves objects, or what they hold.

    Args:
        locations: Attributes and variables.
        before: What the call was given for each.
        after: What lies there now.

    Raises:
        TraceError: It does.
    """
    objects = [(location, value) for location, value in zip(locations, before, strict=True) if has_parts(type(value))]
    owners = {id(one): location for location, value in objects for one in _within(value)}
    if not owners:
        return
    for location, old, new in zip(locations, before, after, strict=True):
        if isinstance(location, Items) or new is old:
            continue
        moved = next((owners[id(one)] for one in _within(new) if id(one) in owners), None)
        if moved is not None:
            raise TraceError(f"it stores in {location.name} an object that lies in {moved.name}, or what that holds")


def _within(value: Any) -> Iterator[Any]:
    """The objects and containers in a value, itself among them."""
    pending, seen = [value], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        if has_parts(type(one)):
            inner = attributes_of(one).values()
        elif is_container(one) or isinstance(one, tuple):
            inner = one.values() if isinstance(one, dict) else one
        else:
            continue
        seen.add(id(one))
        if not isinstance(one, tuple):
            yield one
        pending += inner
