"""Garbage collection while a function is traced: the objects that the trace has made, told from older ones."""

# The state of all traces is in private attributes of the class.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

from pygraph.process.collection import collect, ids_of_objects


class YoungObjects:
    """The objects that were made since a trace began.

    All objects that exist then are frozen (``gc.freeze``), so that those that the collector tracks afterwards are
    young. Objects that the user has frozen could not be told from these and would be unfrozen with them. So where
    there are any, nothing is frozen: an object of ours marks the end of the youngest generation, which the collector
    keeps in the order of creation, and what follows it is young. A collection in the middle of a trace, as by Dynamo,
    moves these objects to another generation, so they are noted before it.
    """

    _users_freeze = False  # whether the user has been seen to freeze objects; to ask takes long where it is so
    _freezing_thread: int | None = None  # the thread whose trace has objects frozen now

    def __init__(self) -> None:
        self._users_freeze = YoungObjects._users_freeze = YoungObjects._users_freeze or gc.get_freeze_count() > 0
        self._noted: set[int] = set()
        self._is_moved = False  # whether a collection has moved all that the youngest generation had at the start
        self._mark: list[Any] = []

    @contextlib.contextmanager
    def tracked(self) -> Generator[None, None, None]:
        """Count what is made inside as young."""
        if not self._users_freeze:
            YoungObjects._freezing_thread = threading.get_ident()
            gc.freeze()
            try:
                yield
            finally:
                gc.unfreeze()
                YoungObjects._freezing_thread = None
            return
        note = self._before_collection  # the very object that is taken away again
        gc.callbacks.append(note)
        try:
            yield
        finally:
            if note in gc.callbacks:
                gc.callbacks.remove(note)

    def collect(self) -> Callable[[], frozenset[int]]:
        """Collect young garbage, which would come next anyway; returns what computes the ids of other young objects."""
        if not self._users_freeze:
            collect()
            return lambda: frozenset(ids_of_objects())
        if not collect(2 if self._is_moved else 0):
            self._note()
        return lambda: frozenset(self._noted)

    def _before_collection(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            self._note()
            self._is_moved = True

    def _note(self) -> None:
        """Note the objects that were made since the start and are in the youngest generation now.

        If one of them is freed, an object at its address is young as well.
        """
        found = ids_of_objects(0)
        mark = id(self._mark)
        first = found.index(mark) + 1 if not self._is_moved and mark in found else 0
        self._noted.update(found[first:])

    @contextlib.contextmanager
    def all_unfrozen(self) -> Generator[None, None, None]:
        """Have the collector look at all objects while what is inside runs.

        Objects that the user has frozen stay unfrozen: to freeze them again, all others would be frozen too, and those
        that become garbage would never be freed.
        """
        gc.unfreeze()
        try:
            yield
        finally:
            if not self._users_freeze:
                gc.freeze()


def _after_fork() -> None:
    """Unfreeze all objects in a child process, unless its only thread is the one that traces."""
    if YoungObjects._freezing_thread not in (None, threading.get_ident()):
        gc.unfreeze()
        YoungObjects._freezing_thread = None


os.register_at_fork(after_in_child=_after_fork)
