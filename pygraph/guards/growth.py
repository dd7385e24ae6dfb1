"""Growth of lists: a function that appends to a log, which it does not read.

Such a list is another one at every call, and passing its items would make no call like one before. So they are not
passed: while the function is traced, a list that takes items and gives no others stands in for it, and what it has got
is returned and appended after each call.
"""

# Lists hold items of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import gc
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from torch.fx.experimental.proxy_tensor import get_proxy_mode  # checked with torch 2.11 and 2.13

from pygraph.errors import StateChangeError, TraceError
from pygraph.guards.locations import Item, Items, Location, Variable, items_of


class _NoItem:
    """The first item of a `GrowingList`, for code in C that reads items as they lie: nothing can be done with it."""


class GrowingList(list[Any]):
    """A list to which items can be added, and of which no others can be read.

    Args:
        original: The list that it stands for.
        name: What errors call it.
        note_read: Called when something is read of it.
        items: The location of all items, which calls can take instead; None if they cannot.
    """

    def __init__(
        self, original: list[Any], name: str, note_read: Callable[[], object] = lambda: None,
        items: Items | None = None,
    ) -> None:  # fmt: skip
        super().__init__([_NoItem()])
        self._original, self._name, self._note_read, self._items = original, name, note_read, items

    @property
    def __class__(self) -> type:  # pyright: ignore
        return list

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._note_read()
        text = f"it reads {self._name}, to which it appends at every call"
        if self._items is None:
            raise TraceError(text)
        error = StateChangeError(text)
        error.locations = (self._items,)
        raise error

    __len__ = __iter__ = __setitem__ = __delitem__ = __contains__ = __reversed__ = _refuse  # pyright: ignore
    __add__ = __mul__ = __rmul__ = __imul__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse  # pyright: ignore
    __repr__ = __bool__ = __reduce_ex__ = __copy__ = __deepcopy__ = __sizeof__ = _refuse  # pyright: ignore
    copy = count = index = insert = pop = remove = clear = sort = reverse = _refuse  # pyright: ignore
    __hash__ = None  # pyright: ignore

    def __getitem__(self, index: Any) -> Any:
        """One of the items that it has got, counted from the end; which others there are, does not matter then."""
        if type(index) is int and -super().__len__() < index < 0:
            return super().__getitem__(index)
        return self._refuse()

    def __iadd__(self, items: Iterable[Any]) -> GrowingList:
        self.extend(items)
        return self


def original_of(growing: GrowingList) -> list[Any]:
    """The list that a `GrowingList` stands for."""
    return growing._original  # pyright: ignore[reportPrivateUsage]


def added_to(growing: GrowingList) -> list[Any]:
    """The items that it has got."""
    return list(list.__iter__(growing))[1:]


def empty(growing: GrowingList) -> None:
    """Take the items from it that it has got."""
    list.__delitem__(growing, slice(1, None))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Growth(Location):
    """The end of a list, with nothing at it between calls.

    Attributes:
        holders: All locations in which the function finds the list.
        name: The name in reports.
    """

    holders: tuple[Item | Variable, ...]
    name: str = ""

    def get(self) -> Any:
        """The items that were added in a trace; nothing otherwise, but for what is no list, or not one."""
        now = self.holders[0].get()
        if any(holder.get() is not now for holder in self.holders):
            return "several lists"
        if type(now) is GrowingList:
            return added_to(now)
        return () if type(now) is list else now

    def put(self, value: Any) -> None:
        """Append items; in a trace, put a list in its stead that gives no items, or itself again."""
        now = self.holders[0].get()
        if type(now) is GrowingList:
            self._store(original_of(now))
        elif type(now) is list and self.get() == ():
            if get_proxy_mode() is not None:
                self._store(GrowingList(now, self.name, items=items_of(self.name, now, now)))
            else:
                now.extend(value)

    def _store(self, container: list[Any]) -> None:
        for holder in self.holders:
            holder.put(container)

    def hide(self) -> Callable[[], None]:
        """Have guards that are made meanwhile not depend on the list; returns what shows it again."""
        shown = [holder.hide() for holder in self.holders]

        def show() -> None:
            for one in reversed(shown):
                one()

        return show

    def is_at(self, owner: Any, key: Any) -> bool:
        """Whether the list is stored there."""
        return any(holder.is_at(owner, key) for holder in self.holders)

    def is_same(self, other: Location) -> bool:
        """Whether another location is the end of the list that is found in the same places."""
        return isinstance(other, Growth) and self.holders[0].is_same(other.holders[0])

    def is_end_of(self, items: Items) -> bool:
        """Whether it is the end of the list that has these items."""
        return self.holders[0].get() is items.container


def growth_of(
    container: list[Any], before: Sequence[Any], name: str, holders: Sequence[Item | Variable],
    reaches: Callable[[object], bool],
) -> Growth | None:  # fmt: skip
    """The growth of a list; None if it has changed otherwise, or is found in other ways than the locations.

    Args:
        container: The list, as it is now.
        before: The items that it had.
        name: The name in reports.
        holders: Where it is stored.
        reaches: Whether the function can reach an object.
    """
    grown = len(container) > len(before) and all(a is b for a, b in zip(container, before))  # noqa: B905
    if type(container) is not list or not grown or not holders:
        return None
    if any(isinstance(one, Item) and isinstance(one.container, types.MappingProxyType) for one in holders):
        return None  # an attribute of a class, in whose place no other list can be put
    known = {id(holder.cell if isinstance(holder, Variable) else holder.container) for holder in holders}
    for referrer in gc.get_referrers(container):
        if id(referrer) not in known and not isinstance(referrer, types.FrameType) and reaches(referrer):
            return None
    return Growth(tuple(holders), name or "a list")
