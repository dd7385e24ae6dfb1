"""Lists, dicts and deques among the arguments of a call: what they are called, and which of them a function changes."""

# Containers hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils import _pytree as pytree

from pygraph.errors import TraceError


class Change(enum.Enum):
    """The way in which a function changes a container that it is passed."""

    GROWS = 1
    """A list is appended to, and nothing is read of it."""
    CHANGES = 2
    HOLDS_OTHERS = 3
    """Nothing of a list is changed, but each call is passed one of other numbers."""
    IS_READ = 4
    """Nor is it changed, but the numbers themselves are needed, so it is nothing but its items."""


def is_container(value: Any) -> bool:
    """Whether a value is a list, a dict or a deque of a class of Python's own."""
    return type(value) in _KINDS


_KINDS = frozenset({list, dict, collections.OrderedDict, collections.defaultdict, collections.deque})


def containers_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The containers among the arguments of a call and their names, each before those that it holds.

    Args:
        args: The arguments. Of objects that pytree does not take apart, nothing is looked at.
        kwargs: The keyword arguments.

    >>> list(containers_among(([1, {}],), {"log": []}))
    [('args[0]', [1, {}]), ('args[0][1]', {}), ("kwargs['log']", [])]
    """
    for index, value in enumerate(args):
        yield from _among(f"args[{index}]", value)
    for key, value in kwargs.items():
        yield from _among(f"kwargs[{key!r}]", value)


def _among(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if is_container(value):
        yield name, value
    elif not isinstance(value, tuple):
        return
    for path, item in _named_items(name, value):
        yield from _among(path, item)


def _named_items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif pytree.is_namedtuple_class(type(value)):
        yield from ((f"{name}.{field}", item) for field, item in zip(type(value)._fields, value, strict=True))
    else:
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))


class ContainersBefore:
    """The containers among the arguments of a call, as they were when this was made.

    Args:
        args: The arguments.
        kwargs: The keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._found = [(name, value, _items(value)) for name, value in containers_among(args, kwargs)]

    def name_of(self, value: Any) -> str | None:
        """The name of a value that is one of them; None if it is not."""
        return next((name for name, container, _ in self._found if container is value), None)

    def changed(self, may_change: Callable[[Any], bool] = lambda _: False) -> dict[str, Change]:
        """The names of containers that hold something else by now, and how they have changed.

        Args:
            may_change: Whether one is left out.
        """
        found: dict[str, Change] = {}
        for name, container, before in self._found:
            now = _items(container)
            if may_change(container):
                continue
            if len(now) == len(before) and _begins_with(now, before):
                continue
            is_grown = type(container) is list and len(now) > len(before) and _begins_with(now, before)
            found[name] = Change.GROWS if is_grown else Change.CHANGES
        return found

    def check_absent(self, result: Any) -> None:
        """Refuse a result that has one of them.

        Raises:
            TraceError: It has.
        """
        found = {id(value) for _, value in containers_among((result,), {})}
        if any(id(container) in found for _, container, _ in self._found):
            raise TraceError("it returns a container that lies in an attribute or a variable")


def _items(container: Any) -> list[Any]:
    """The items of a container; the keys and values of a dict, in their order."""
    return [part for pair in container.items() for part in pair] if isinstance(container, dict) else [*container]


def _begins_with(items: list[Any], before: list[Any]) -> bool:
    return all(a is b for a, b in zip(items, before, strict=False))


_NEW_AFTER = {
    Change.GROWS: {Change.CHANGES},
    Change.CHANGES: set[Change](),
    Change.HOLDS_OTHERS: {Change.CHANGES, Change.IS_READ},
    Change.IS_READ: {Change.GROWS, Change.CHANGES},
}
"""The changes of a container that say more than what is known of it."""


class ChangingContainers:
    """The containers that calls of a function are known to change.

    Args:
        most: How many are noted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._noted: dict[str, Change] = {}
        self._known: dict[str, Change] = {}

    def note(self, changed: Mapping[str, Change]) -> bool:
        """Note changes that a trace has found; whether any of them was not known."""
        new = {name: change for name, change in changed.items() if self.is_new(name, change)}
        if not new or len(self._noted.keys() | new.keys()) > self._most:
            return False
        self._noted.update(new)
        self._known = {name: change for name, change in self._noted.items() if change is not Change.IS_READ}
        return True

    def is_new(self, name: str, change: Change) -> bool:
        """Whether less is known of a container's changes."""
        known = self._noted.get(name)
        return known is None or change in _NEW_AFTER[known]

    @property
    def known(self) -> Mapping[str, Change]:
        """The changes of containers by name; those of a list in an object have names as ``args[0].log``."""
        return self._known
