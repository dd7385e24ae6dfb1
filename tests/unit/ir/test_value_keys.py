"""Keys of values: equal only where all that can be read of two values is equal."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from pygraph.ir.value_keys import Equal, Identity, dict_keys, form, structure_key, value_key


@dataclasses.dataclass(frozen=True)
class Config:
    name: str
    scale: Any = dataclasses.field(default=1.0, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    scale: Any
    more: Any = None


@dataclasses.dataclass(frozen=True)
class AlwaysEqual:
    scale: Any

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True, eq=False)
class Itself:
    scale: Any


class Derived(Config):
    pass


class Options:
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Text(str):
    unit: int


class Real(float):
    unit: int


class Items(tuple[Any, ...]):
    pass


class Point(NamedTuple):
    x: Any


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Number(enum.IntEnum):
    ONE = 1


class AllEqual(enum.Enum):
    RED = 1
    BLUE = 2

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def with_attribute(value: Any, **attributes: Any) -> Any:
    for name, item in attributes.items():
        object.__setattr__(value, name, item)
    return value


NAN = float("nan")
WEST, EAST = datetime.timezone(datetime.timedelta(hours=-1)), datetime.timezone(datetime.timedelta(hours=1))

SAME: list[Callable[[], Any]] = [
    lambda: 1,
    lambda: NAN,
    lambda: None,
    lambda: "a" * 3,
    lambda: np.float32(0.5),
    lambda: np.float64("nan"),
    lambda: (1, "a", (2.0, None)),
    lambda: [1, {"a": {2}}],
    lambda: Config("a", (1, 2.0)),
    lambda: Config("a", Slotted(1)),
    lambda: Config("a", [1, 2]),
    lambda: AlwaysEqual(2),
    lambda: Slotted(1, "b"),
    lambda: Derived("a", 2),
    lambda: with_attribute(Config("a"), more=3),
    lambda: with_attribute(Text("a"), unit=3),
    lambda: with_attribute(Real(2.0), unit=3),
    lambda: Items((1, 2)),
    lambda: Point(1),
    lambda: Color.RED,
    lambda: torch.float32,
    lambda: torch.device("cpu"),
    lambda: torch.Size([1, 2]),
    lambda: range(1, 3),
    lambda: slice(1, 3),
    lambda: frozenset({1, 2}),
    lambda: pathlib.Path("a/b"),
    lambda: decimal.Decimal("1.50"),
    lambda: fractions.Fraction(1, 2),
    lambda: datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
    lambda: datetime.date(2020, 1, 2),
    lambda: collections.OrderedDict(a=1),
]


@pytest.mark.parametrize("make", SAME)
def test_values_with_the_same_parts_are_one(make: Callable[[], Any]) -> None:
    assert value_key(make()) == value_key(make())
    assert hash(value_key(make())) == hash(value_key(make()))
    assert form(value_key(make())) == value_key(make())


OTHERS: list[tuple[Any, Any]] = [
    (1, True), (1, 1.0), (1, np.int64(1)), (0.0, -0.0), (0j, -0j), (1.0, np.float64(1.0)), (1, Number.ONE),
    (np.float32(0.0), np.float32(-0.0)), (np.datetime64("2020-01-01", "D"), np.datetime64("2020-01-01", "s")),
    ((1,), (True,)), ((1,), [1]), ((1,), Point(1)), (Point(1), Point(True)), (Items((1,)), Items((1.0,))),
    (Items((1,)), with_attribute(Items((1,)), unit=3)),
    (frozenset({1}), frozenset({True})), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1: 0}, {True: 0}),
    (range(0), range(1, 1)), (slice(1), slice(True)), (torch.Size([1]), (1,)),
    (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    (datetime.datetime(2020, 1, 2, 10, tzinfo=WEST), datetime.datetime(2020, 1, 2, 12, tzinfo=EAST)),
    (datetime.datetime(2020, 1, 2), datetime.datetime(2020, 1, 2, fold=1)),
    (Config("a", 1.0), Config("a", 2.0)), (Config("a", 1), Config("a", 1.0)), (Config("a"), Derived("a")),
    (Config("a"), with_attribute(Config("a"), more=1)),
    (Config("a", Config("b", 1)), Config("a", Config("b", 2))),
    (Slotted(1, "b"), Slotted(1, "c")), (AlwaysEqual(1), AlwaysEqual(2)),
    (Options(1), Options(1)), (Options, AlwaysEqual), (AllEqual.RED, AllEqual.BLUE),
    (Config("a", torch.zeros(1)), Config("a", torch.zeros(1))), (Config("a", Options(1)), Config("a", Options(1))),
    (with_attribute(Text("a"), unit=1), with_attribute(Text("a"), unit=2)), ("a", Text("a")),
    (with_attribute(Real(1.0), unit=1), with_attribute(Real(1.0), unit=2)), (Real(0.0), Real(-0.0)),
    (Itself(1), Itself(1)), (time.gmtime(0), time.localtime(0)), (object(), object()),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_values_of_which_something_differs_are_two(one: Any, other: Any) -> None:
    assert value_key(one) == value_key(one)
    assert value_key(one) != value_key(other)
    assert value_key(other) != value_key(one)


def test_methods_are_those_of_their_objects() -> None:
    one, other = Items((1,)), Items((1,))
    assert value_key(one.index) == value_key(one.index)
    assert value_key(one.index) != value_key(other.index)
    first, second = Options(1), Options(1)
    assert value_key(first.__hash__) == value_key(first.__hash__)
    assert value_key(first.__hash__) != value_key(second.__hash__)


def test_a_key_changes_with_the_value() -> None:
    config = Config("a", [1])
    before = value_key(config)
    config.scale.append(2)
    assert value_key(config) != before
    config.scale.pop()
    assert value_key(config) == before
    object.__setattr__(config, "name", "b")
    assert value_key(config) != before


def test_a_value_that_holds_itself_has_a_key() -> None:
    items: list[Any] = []
    items.append(items)
    assert value_key(items) == value_key(items)


def test_an_object_is_not_kept_alive_and_its_address_is_not_its_key() -> None:
    for _ in range(1000):
        made = Options(1)
        key, address = Identity(made), id(made)
        del made
        assert repr(key) == "a Options"
        other = Options(1)
        assert Identity(other) != key
        if id(other) == address:
            assert hash(Identity(other)) == hash(key)
            return
    pytest.fail("no other object was where one had been")


def test_what_has_no_weak_references_is_held() -> None:
    made = iter([1])
    key = Identity(made)
    assert Identity(made) == key


def test_streams_and_events_have_no_weak_references_to_them() -> None:
    """Those of CUDA would dangle: torch's own classes clear none."""
    event = torch.Event(device="cpu")
    key, count = Identity(event), weakref.getweakrefcount(event)
    assert count == 0
    assert Identity(event) == key
    assert Identity(torch.Event(device="cpu")) != key


def test_a_stream_is_the_same_whatever_object_stands_for_it() -> None:
    one, other = torch.Stream(device="cpu"), torch.Stream(device="cpu")
    assert one is not other
    assert value_key(one) == value_key(other)
    assert weakref.getweakrefcount(one) == 0


@pytest.mark.gpu
def test_other_streams_are_other_keys() -> None:
    current = value_key(torch.cuda.current_stream())
    assert value_key(torch.cuda.current_stream()) == current
    assert value_key(torch.cuda.Stream()) != current


def test_texts_of_keys() -> None:
    assert repr(value_key(Config("a", (1, 2.5)))) == "Config(name='a', scale=tuple(1, 2.5))"
    assert repr(value_key(Config("a", pathlib.PurePosixPath("b")))) == "Config(name='a', scale=b)"
    assert repr(value_key(Options)) == repr(Options)


def test_a_form_has_classes_for_objects() -> None:
    first, second = Config("a", object()), Config("a", object())
    assert form(value_key(first)) == form(value_key(second)) != form(value_key(Config("b", object())))
    assert form(value_key(Options(1))) is Options


# ---- structures ------------------------------------------------------------------------------------------------------


class Pair:
    def __init__(self, first: Any, second: Any, note: Any) -> None:
        self.first, self.second, self.note = first, second, note


pytree.register_pytree_node(
    Pair, lambda pair: ([pair.first, pair.second], pair.note), lambda parts, note: Pair(*parts, note)
)


def structure_of(value: Any) -> Any:
    return structure_key(pytree.tree_structure(value))


def test_structures() -> None:
    made: list[Callable[[], Any]] = [
        lambda: 1, lambda: (1,), lambda: [1], lambda: {"a": 1}, lambda: {"b": 1}, lambda: {1: 1}, lambda: {True: 1},
        lambda: {1.0: 1}, lambda: collections.OrderedDict(a=1), lambda: collections.defaultdict(int, a=1),
        lambda: collections.defaultdict(float, a=1), lambda: collections.deque([1]),
        lambda: collections.deque([1], maxlen=2), lambda: Point(1), lambda: torch.Size([1]), lambda: {"a": (), "b": 1},
        lambda: {"a": [], "b": 1}, lambda: {Config("a", 1): 1}, lambda: {Config("a", 2): 1},
        lambda: Pair(1, 2, "a"), lambda: Pair(1, 2, [1]), lambda: Pair(1, 2, [True]), lambda: Pair(1, 2, Options(1)),
    ]  # fmt: skip
    keys = [structure_of(make()) for make in made]
    assert len(set(keys)) == len(keys)
    assert keys == [structure_of(make()) for make in made]


def test_keys_that_are_objects_are_equal_to_themselves_alone() -> None:
    one, other = Options(1), Options(1)
    assert structure_of({one: 1}) == structure_of({one: 2})
    assert structure_of({one: 1}) != structure_of({other: 1})
    assert list(dict_keys(pytree.tree_structure(({one: [{"a": {}}]}, collections.defaultdict(int, b=1))))) == [
        one, "a", "b",
    ]  # fmt: skip


def test_containers_of_one_name_and_two_classes_are_two() -> None:
    def made() -> Any:
        return collections.namedtuple("Made", "x")(1)

    assert structure_of(made()) != structure_of(made())


def test_equality_of_users_values() -> None:
    one, other = Equal(Options(1)), Equal(Options(2))
    assert one == other
    assert hash(one) == hash(other)
    assert Equal(1) != Equal(True)
    assert hash(Equal([1])) == hash(Equal([1]))
    assert repr(Equal(1)) == "1"
