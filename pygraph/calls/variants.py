"""The cache of a function: what each kind of call runs, validated at every lookup.

A key holds a call's arguments and settings. What the function reads besides them is compared when a value is looked up,
so one key may have several: a module that goes back and forth between training and evaluation has one for each.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from pygraph.calls import limits
from pygraph.calls.retries import Budget


class Variant(Protocol):
    """A way to run one kind of call, as long as what the function reads besides is what it was.

    Attributes:
        calls: How many calls it has served.
        stamp: The time of its last call, by the clock of the native plans.
    """

    calls: int
    stamp: int

    @property
    def cost(self) -> float:
        """The seconds that are lost with it."""
        ...

    def is_valid(self) -> bool:
        """Whether a call that has its key runs it now."""
        ...

    def is_current(self) -> bool:
        """Whether what the function reads is what it was."""
        ...

    def may_return(self) -> bool:
        """Whether it may be valid again, although it is not now."""
        ...


K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Variant)


class Variants(Generic[K, V]):
    """Values by key, of which the least recently used make room for others.

    Args:
        limit: How many there are at most.
        forget: Gives back what a value holds that is dropped.

    Attributes:
        turnover: The budget of values that were pushed out by others before they had been used a few times.
    """

    def __init__(self, limit: int, forget: Callable[[V], None]) -> None:
        self.limit = limit
        self.turnover = Budget(2 * limit, limits.LIMITS.trace_share)
        self._forget = forget
        self._keys: collections.OrderedDict[V, K] = collections.OrderedDict()
        self._by_key: dict[K, list[V]] = {}

    def __iter__(self) -> Iterator[V]:
        return iter(list(self._keys))  # another thread may add some

    def __len__(self) -> int:
        return len(self._keys)

    # -- lookup -----------------------------------------------------------------------------------------------------

    def find(self, key: K) -> V | None:
        """The value that a call runs, the most recently used first; None if there is none."""
        return next((value for value in self._by_key.get(key, ()) if value.is_valid()), None)

    def of(self, key: K) -> list[V]:
        """All values of a key, the most recently used first."""
        return list(self._by_key.get(key, ()))

    def touch(self, value: V) -> None:
        """Note that a value was used."""
        self._keys.move_to_end(value)
        same = self._by_key[self._keys[value]]
        if same[0] is not value:
            same.remove(value)
            same.insert(0, value)

    def order(self) -> None:
        """Put values in the order of their stamps, in which they were used by calls that came by another path."""
        for value in sorted(self._keys, key=lambda value: value.stamp):
            self.touch(value)

    # -- changes ----------------------------------------------------------------------------------------------------

    def add(self, key: K, value: V) -> int:
        """Add a value, as the most recently used one; returns how many had to make room for it."""
        self._keys[value] = key
        self._by_key.setdefault(key, []).insert(0, value)
        evicted = 0
        while len(self._keys) > self.limit:
            oldest = next(iter(self._keys))
            if oldest.calls < limits.LIMITS.settled_calls:
                self.turnover.lose(oldest.cost)
            else:
                self.turnover.renew()
            self.drop(oldest)
            evicted += 1
        return evicted

    def make_room(self, key: K) -> None:
        """Drop the values of a key that no call will run again, or that are too many."""
        kept = 0
        for value in self.of(key):
            if kept < limits.LIMITS.variants - 1 and not value.is_current() and value.may_return():
                kept += 1
            else:
                self.drop(value)

    def drop(self, value: V) -> None:
        """Drop a value."""
        key = self._keys.pop(value)
        self._by_key[key].remove(value)
        if not self._by_key[key]:
            del self._by_key[key]
        self._forget(value)

    def drop_all(self, key: K) -> None:
        """Drop all values of a key."""
        for value in self.of(key):
            self.drop(value)

    def clear(self) -> None:
        """Drop all values."""
        for value in self:
            self.drop(value)
        self.turnover.renew()
