"""What is asked of the garbage collector breaks nothing in other threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pygraph.process import extension
from pygraph.process.collection import (
    ids_of_objects,
    no_collection,
    objects_of,
    references_leading_to,
    referrers_of,
)


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


@pytest.mark.usefixtures("native")
def test_what_is_passed_to_look_is_not_found() -> None:
    values, holder = [Thing()], {}
    holder["key"] = values[0]
    found = referrers_of(values)
    assert [one for one in found if one is not holder] == []


@pytest.mark.usefixtures("native")
def test_what_refers_to_objects_is_found() -> None:
    one, two = Thing(), Thing()
    holders: list[Any] = [{"key": one}, [two], (one, two), ((), (two,)), (item for item in (one,)), lambda: one]
    expected = [holders[0], holders[1], holders[2], holders[3][1], holders[5].__closure__[0]]
    # Also what belongs to this test: its list of both, and the variables of the generator.
    found = referrers_of([one, two])
    assert set(map(id, expected)) <= set(map(id, found))
    assert set(map(id, found)) <= set(map(id, gc.get_referrers(one, two)))


@pytest.mark.usefixtures("native")
def test_references_are_followed_through_some_objects_and_end_at_others() -> None:
    value = Thing()
    young: list[Any] = [[value], {"key": value}]
    young.append({"list": young[0], "dict": young[1]})
    old = [[young[2]], {"item": young[0]}]
    beyond = [old[0]]
    through = frozenset(map(id, young))
    found = {(id(a), id(b)) for a, b in references_leading_to([value], through) if a is not young and a is not beyond}
    expected = [
        (young[0], value), (young[1], value), (young[2], young[0]), (young[2], young[1]),
        (old[0], young[2]), (old[1], young[0]),
    ]  # fmt: skip
    assert found == {(id(a), id(b)) for a, b in expected}


@pytest.mark.usefixtures("native")
def test_ways_may_lead_in_circles() -> None:
    value, young = Thing(), [Thing(), Thing()]
    young[0].__dict__.update(other=young[1], value=value)
    young[1].__dict__["other"] = young[0]
    old = {"item": young[1]}
    through = frozenset(map(id, [*young, *map(vars, young)]))
    pairs = references_leading_to([value], through)
    ends = [a for a, b in pairs if b is young[1] and a is not young and id(a) not in through]
    assert [end is old for end in ends] == [True]


class Equal:
    def __eq__(self, other: object) -> bool:
        raise AssertionError("nobody's code is run")

    __hash__ = None  # type: ignore[assignment]


def test_looking_for_referrers_runs_nobodys_code() -> None:
    one, holder = Thing(), Equal()
    holder.__dict__["item"] = one
    assert any(found is holder or found is vars(holder) for found in referrers_of([one]))


class Searched:
    pass


SEARCHED = Searched()
MANY = [[SEARCHED] for _ in range(1000)]

in_cpp = pytest.mark.skipif(
    extension.loaded() is None, reason="without the extension, tuples that are filled are found"
)


@pytest.mark.parametrize(
    "search",
    [lambda: objects_of(lambda kind: kind is Thing), ids_of_objects, lambda: ids_of_objects(0),
     pytest.param(lambda: referrers_of([SEARCHED]), marks=in_cpp),
     pytest.param(lambda: references_leading_to([SEARCHED], frozenset(map(id, MANY))), marks=in_cpp)],
    ids=["objects", "ids", "young", "referrers", "references"],
)  # fmt: skip
def test_other_threads_may_fill_tuples(search: Callable[[], Any]) -> None:
    """A tuple of unknown length must have one owner while it is filled, or Python raises a SystemError."""
    errors: list[BaseException] = []
    done = threading.Event()

    def fill() -> None:
        try:
            while not done.is_set():
                tuple(SEARCHED for _ in range(40))
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
