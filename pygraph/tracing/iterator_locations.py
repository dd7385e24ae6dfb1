"""Locations of iterators and functions to replace: entries, variables, attributes, slots, defaults, bound arguments."""

# Iterators give values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from pygraph.guards.environment import Environment
from pygraph.guards.iterators import is_generator, is_generator_or_method, is_opaque
from pygraph.guards.locations import Item, Variable
from pygraph.guards.system_calls import is_system_call
from pygraph.tracing.math_functions import is_math_function

Access: TypeAlias = tuple[Callable[[], object], Callable[[object], object], object]
"""How to read a location, how to set it, and its value."""


def locations_of(environment: Environment) -> Iterator[Access]:
    """Locations of iterators, torch's generators, calls of the system, functions of ``math``, and tuples with them.

    Yields:
        How to read a location, how to set it, and its value.
    """
    for container, key, value in environment.guards.items():
        if _may_be(value):
            location = Item(container, key)
            yield location.get, location.put, value
    for cell, value in environment.guards.cells:
        if _may_be(value):
            variable = Variable(cell)
            yield variable.get, variable.put, value
    for cls, name, value in environment.snapshot.class_attributes():
        if _may_be(value):
            yield (
                functools.partial(vars(cls).get, name), functools.partial(type.__setattr__, cls, name), value,
            )  # fmt: skip
    for value in environment.objects():
        yield from _inside(value)


def generators_of(environment: Environment) -> list[torch.Generator]:
    """The random generators of torch's that a function can reach."""
    pending, found = [value for _, _, value in locations_of(environment)], list[torch.Generator]()
    while pending:
        value: Any = pending.pop()
        if issubclass(type(value), tuple):
            pending += value
        elif is_generator_or_method(value):
            found.append(value if is_generator(value) else value.__self__)
    return found


def _may_be(value: object) -> bool:
    if issubclass(type(value), tuple):
        return is_opaque(value) or any(map(_may_be, value))  # pyright: ignore
    return is_opaque(value) or is_generator_or_method(value) or is_system_call(value) or is_math_function(value)


def _inside(value: Any) -> Iterator[Access]:
    """Locations in an object that are no entries of a dict or a list."""
    if issubclass(type(value), types.FunctionType):
        if value.__defaults__ and _may_be(value.__defaults__):
            yield lambda: value.__defaults__, functools.partial(setattr, value, "__defaults__"), value.__defaults__
    elif issubclass(type(value), functools.partial):
        if _may_be(value.func):
            yield lambda: value.func, functools.partial(_set_function, value), value.func
        if _may_be(value.args):
            yield lambda: value.args, functools.partial(_set_arguments, value), value.args
    elif issubclass(type(value), collections.deque):
        for index, item in enumerate(value):
            if _may_be(item):
                yield functools.partial(value.__getitem__, index), functools.partial(value.__setitem__, index), item
    else:
        for slot in _slots_of(type(value)):
            with contextlib.suppress(AttributeError):  # it holds nothing
                if _may_be(item := slot.__get__(value)):
                    yield functools.partial(_slot, slot, value), functools.partial(slot.__set__, value), item


def _set_function(partial: functools.partial[Any], function: object) -> None:
    state: Any = (function, partial.args, partial.keywords, vars(partial))
    partial.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


def _set_arguments(partial: functools.partial[Any], args: object) -> None:
    state: Any = (partial.func, args, partial.keywords, vars(partial))
    partial.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


def _slot(slot: types.MemberDescriptorType, value: object) -> object:
    return getattr(value, slot.__name__, None)


@functools.lru_cache(maxsize=4096)
def _slots_of(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    if not cls.__flags__ & (1 << 9):  # made by a class statement
        return ()
    found = (slot for base in cls.__mro__ for slot in vars(base).values())
    return tuple(slot for slot in found if isinstance(slot, types.MemberDescriptorType) and slot.__name__[:2] != "__")
