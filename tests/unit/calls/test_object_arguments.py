"""Arguments that are objects: one never stands for another of which a function may read something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("native")


@dataclasses.dataclass(frozen=True)
class Config:
    name: str
    scale: Any = dataclasses.field(default=1.0, compare=False)


class Options:
    def __init__(self, name: str, scale: float) -> None:
        self.name, self.scale = name, scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class Scale(float):
    unit: float


class Name(str):
    scale: float


def named(scale: float) -> Name:
    made = Name("a")
    made.scale = scale
    return made


def of_unit(unit: float) -> Scale:
    made = Scale(1.0)
    made.unit = unit
    return made


def scaled(x: Tensor, options: Any) -> Tensor:
    return x * options.scale


def first_scaled(x: Tensor, options: Any) -> Tensor:
    return x * next(iter(options)).scale


Made = tuple[Callable[[float], Any], Callable[[Tensor, Any], Tensor]]

MAKERS: dict[str, Made] = {
    "dataclass": (lambda scale: Config("a", scale), scaled),
    "class": (lambda scale: Options("a", scale), scaled),
    "text": (named, scaled),
    "number": (of_unit, lambda x, number: x * number * number.unit),
    "in a list": (lambda scale: [Config("a", scale)], first_scaled),
    "in a tuple": (lambda scale: (Options("a", scale),), first_scaled),
    "in a dict": (lambda scale: {"a": Options("a", scale)}, lambda x, made: scaled(x, made["a"])),
    "in a frozenset": (lambda scale: frozenset({Config("a", scale)}), first_scaled),
    "key": (lambda scale: {Config("a", scale): 1}, first_scaled),
    "key by equality": (lambda scale: {Options("a", scale): ()}, first_scaled),
    "key in a tuple": (lambda scale: {(Options("a", scale), 1): ()}, lambda x, made: first_scaled(x, next(iter(made)))),
    "in a dataclass": (lambda scale: Config("b", Config("a", scale)), lambda x, made: scaled(x, made.scale)),
    "items": (lambda scale: frozenset({scale}), lambda x, items: x * sum(items)),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_an_object_stands_for_no_other(device: torch.device, kind: str) -> None:
    make, function = MAKERS[kind]
    fast, x = pygraph.jit(function), torch.ones(2, device=device)
    made = [make(1.0), make(2.0)]
    for _ in range(4):
        for options in made:
            assert torch.equal(fast(x, options), function(x, options))
        for scale in (1.0, 2.0, 3.0):
            assert torch.equal(fast(x, make(scale)), function(x, make(scale)))
    # Objects of a class with a hash are taken apart once there was another one: their numbers are arguments then.
    assert fast.cache_info().captures >= 2


@pytest.mark.parametrize("kind", ["dataclass", "class", "number", "key by equality"])
def test_an_object_stands_for_no_other_under_autograd(device: torch.device, kind: str) -> None:
    make, function = MAKERS[kind]
    fast, x = pygraph.jit(function), torch.ones(2, device=device, requires_grad=True)
    for scale in (1.0, 2.0, 1.0, 2.0):
        assert torch.equal(fast(x, make(scale)), function(x, make(scale)))
    batched = torch.func.vmap(lambda x: (fast(x, make(1.0)), fast(x, make(2.0))))(torch.ones(3, 2, device=device))
    assert [one.unique().tolist() for one in batched] == [[1.0], [2.0]]


@pytest.mark.parametrize("kind", ["dataclass", "class", "key", "key by equality", "in a list"])
def test_an_object_that_is_changed_later(device: torch.device, kind: str) -> None:
    make, function = MAKERS[kind]
    fast, x = pygraph.jit(function), torch.ones(2, device=device)
    made, other = make(1.0), make(1.0)

    def check() -> None:
        for options in (made, other, make(1.0)):
            assert torch.equal(fast(x, options), function(x, options))

    for _ in range(3):
        check()
    changed = made if hasattr(made, "scale") else next(iter(made))
    for scale in (5.0, 1.0, 7.0):
        object.__setattr__(changed, "scale", scale)
        for _ in range(3):
            check()


@dataclasses.dataclass(frozen=True, eq=False)
class Itself:
    scale: float


@pytest.mark.parametrize("make", [Itself, lambda scale: Config("a", scale)], ids=["without equality", "by value"])
@pytest.mark.parametrize("is_key", [False, True], ids=["argument", "key"])
def test_an_equal_object_that_is_changed_later(device: torch.device, make: Any, is_key: bool) -> None:
    function = first_scaled if is_key else scaled
    fast, x = pygraph.jit(function), torch.ones(2, device=device)
    one, other = make(1.0), make(1.0)
    passed = [{one: 1}, {other: 1}] if is_key else [one, other]
    for value in (*passed, *passed[1:] * 4):  # guards are those of the first, and calls pass the second
        assert fast(x, value)[0].item() == 1.0
    object.__setattr__(other, "scale", 2.0)
    assert [fast(x, value)[0].item() for value in passed] == [1.0, 2.0]


def test_objects_with_the_same_parts_are_one_kind(device: torch.device) -> None:
    fast, x = pygraph.jit(scaled, strict=True), torch.ones(2, device=device)
    for _ in range(4):
        fast(x, Config("a", 2.0))
    assert fast.cache_info()[:3] == (3, 1, 1)


def test_numbers_of_one_value_and_two_types(device: torch.device) -> None:
    x = torch.ones(2, dtype=torch.int64, device=device)
    fast = pygraph.jit(lambda x, config: x * config.scale)
    assert [fast(x, Config("a", scale)).dtype for scale in (2, 2.0, 2)] == [torch.int64, torch.float32, torch.int64]
    fast = pygraph.jit(lambda x, numbers: x * next(iter(numbers)))
    assert [fast(x, {scale: 0}).dtype for scale in (2, 2.0, 2)] == [torch.int64, torch.float32, torch.int64]


def test_a_change_is_named_as_the_user_writes_it(device: torch.device) -> None:
    fast, x, options = pygraph.jit(scaled), torch.ones(2, device=device), Options("a", 1.0)
    fast(x, options=options)
    options.scale = 2.0
    fast(x, options=options)
    assert ": kwargs['options'].scale has changed; " in fast.explain_misses().splitlines()[-1]


def test_an_object_that_calls_change_is_itself(device: torch.device) -> None:
    def counts(x: Tensor, config: Config) -> Tensor:
        object.__setattr__(config, "scale", config.scale + 1)
        return x * config.scale

    fast, x = pygraph.jit(counts), torch.ones(2, device=device)
    for _ in range(5):
        config = Config("a", 1.0)
        assert [fast(x, config)[0].item() for _ in range(3)] == [2.0, 3.0, 4.0]
        assert config.scale == 4.0


def test_a_key_that_calls_change(device: torch.device) -> None:
    def counts(x: Tensor, table: dict[Options, int]) -> Tensor:
        for key in table:
            key.scale += 1
            x = x * key.scale
        return x

    fast, x, key = pygraph.jit(counts), torch.ones(2, device=device), Options("a", 1.0)
    assert [fast(x, {key: 1})[0].item() for _ in range(4)] == [2.0, 3.0, 4.0, 5.0]
    assert key.scale == 5.0


def test_a_key_of_a_closed_over_dict(device: torch.device) -> None:
    key = Options("a", 1.0)
    table = {key: 1}
    fast, x = pygraph.jit(lambda x: x * next(iter(table)).scale), torch.ones(2, device=device)
    assert [fast(x)[0].item() for _ in range(3)] == [1.0] * 3
    key.scale = 2.0
    assert fast(x)[0].item() == 2.0


def test_the_object_that_is_returned(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, options: (x * options.scale, options)), torch.ones(2, device=device)
    for options in [Options("a", 1.0), Options("a", 1.0)] * 2:
        assert fast(x, options)[1] is options


def test_equality_decides_where_an_argument_is_marked(device: torch.device) -> None:
    """The contract of JAX: what a class calls equal is the same value."""
    x = torch.ones(2, device=device)
    fast, named = pygraph.jit(scaled, static_argnums=1), pygraph.jit(scaled, static_argnames="options")
    for name in ("a", "b"):
        assert [fast(x, Options(name, scale))[0].item() for scale in (1.0, 2.0)] == [1.0, 1.0]
        assert [named(x, options=Options(name, scale))[0].item() for scale in (1.0, 2.0)] == [1.0, 1.0]
    compiled = fast.lower(x, Config("a", 1.0)).compile()
    assert compiled(x, Config("a", 2.0))[0].item() == 1.0


@pytest.mark.parametrize("kind", ["dataclass", "class", "in a list"])
def test_a_compiled_call_takes_no_other_object(device: torch.device, kind: str) -> None:
    make, function = MAKERS[kind]
    x, made = torch.ones(2, device=device), make(1.0)
    compiled = pygraph.jit(function).lower(x, made).compile()
    assert compiled(x, made)[0].item() == 1.0
    with pytest.raises(ArgumentError, match="which was baked in"):
        compiled(x, make(2.0))


def test_a_slice_has_a_graph(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, part: x[part] * 2, strict=True), torch.arange(4.0).to(device)
    for part in [slice(0, 2), slice(1, 3), slice(0, 2), slice(None, None, 2)]:
        assert torch.equal(fast(x, part), x[part] * 2)
    assert fast.cache_info()[:3] == (1, 3, 3)
