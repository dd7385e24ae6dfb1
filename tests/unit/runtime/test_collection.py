"""What is asked of the garbage collector breaks nothing in other threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pygraph.runtime.collection import ids_of_objects, no_collection, objects_of


class Thing:
    pass


def test_objects_are_found() -> None:
    things = [Thing(), Thing()]
    assert sorted(map(id, objects_of(lambda kind: issubclass(kind, Thing)))) == sorted(map(id, things))
    assert set(map(id, things)) <= set(ids_of_objects())


def test_young_objects_are_in_the_order_in_which_they_were_made() -> None:
    gc.collect()
    things = [Thing() for _ in range(5)]
    young = ids_of_objects(0)
    assert [young.index(id(thing)) for thing in things] == sorted(young.index(id(thing)) for thing in things)


@pytest.mark.parametrize(
    "search", [lambda: objects_of(lambda kind: kind is Thing), ids_of_objects, lambda: ids_of_objects(0)],
    ids=["objects", "ids", "young"],
)  # fmt: skip
def test_other_threads_may_fill_tuples(search: Callable[[], Any]) -> None:
    """A tuple of unknown length must have one owner while it is filled, or Python raises a SystemError."""
    errors: list[BaseException] = []
    done = threading.Event()

    def fill() -> None:
        try:
            while not done.is_set():
                tuple(str(i) for i in range(40))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fill) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(20):
            with no_collection():
                search()
    finally:
        done.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join(60)
    assert errors == []
