"""Arguments that cannot be part of a key: each is named as the user writes it, and every remedy works."""

from __future__ import annotations

import collections
import dataclasses
import io
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.errors import FallbackError


class Whole:
    """A class whose objects are not taken apart, as their end is noticed."""

    def __del__(self) -> None:
        pass


@dataclasses.dataclass
class Plain(Whole):
    scale: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


@dataclasses.dataclass(frozen=True)
class OfList:
    scales: Any


@dataclasses.dataclass
class OfTensor(Whole):
    weight: Tensor
    scale: float = 2.0


@dataclasses.dataclass
class Registered:
    weight: Tensor
    scale: float = 2.0


torch.export.register_dataclass(Registered)


@dataclasses.dataclass(eq=False)
class WithoutEquality:
    weight: Tensor
    scale: float = 2.0


class Valued(Whole):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Valued) and self.scale == other.scale


class Hashed(Valued):
    __hash__ = object.__hash__


class Items(list[float]):
    pass


class Row(tuple[Any, ...]):
    pass


def items() -> Iterator[float]:
    yield 2.0


def scaled(x: Tensor, value: Any) -> Tensor:
    return x * value.scale


def weighted(x: Tensor, value: Any) -> Tensor:
    return x * value.weight * value.scale


def summed(x: Tensor, values: Any) -> Tensor:
    return x * sum(values)


def by_name(x: Tensor, values: Any) -> Tensor:
    return x * values["a"]


TEXTS = np.array(["a", "b"])

Case = tuple[Callable[[Tensor, Any], Tensor], Callable[[Tensor], Any], str, Callable[[Tensor, Any], Any]]

CASES: dict[str, Case] = {
    "texts": (
        lambda x, a: x * len(a),
        lambda x: TEXTS,
        "a NumPy array of <U1. Pass its numbers as a tensor, and its texts as a tuple.",
        lambda x, a: tuple(a.tolist()),
    ),
    "set": (
        summed,
        lambda x: {2.0, 1.0},
        "a set, whose items may change from call to call. Pass tuple(sorted(args[1])) instead.",
        lambda x, a: tuple(sorted(a)),
    ),
    "set without an order": (
        lambda x, a: x * sum(map(abs, a)),
        lambda x: {2j, 1.0},
        "a set, whose items may change from call to call. Pass tuple(args[1]) instead.",
        lambda x, a: tuple(a),
    ),
    "counter": (
        by_name,
        lambda x: collections.Counter("aa"),
        "a Counter, whose items may change from call to call. Pass dict(args[1]) instead.",
        lambda x, a: dict(a),
    ),
    "proxy": (
        by_name,
        lambda x: types.MappingProxyType({"a": x}),
        "a mappingproxy, whose items may change from call to call. Pass dict(args[1]) instead.",
        lambda x, a: dict(a),
    ),
    "list": (
        summed,
        lambda x: Items([2.0, 1.0]),
        "an Items, whose items may change from call to call. Pass list(args[1]) instead.",
        lambda x, a: list(a),
    ),
    "tuple": (
        lambda x, a: x * a[0][0],
        lambda x: Row(([2.0],)),
        "a Row, whose items may change from call to call. Pass list(args[1]) instead.",
        lambda x, a: list(a),
    ),
    "bytes": (
        summed,
        lambda x: bytearray(b"ab"),
        "a bytearray, whose items may change from call to call. Pass list(args[1]) instead.",
        lambda x, a: list(a),
    ),
    "generator": (
        lambda x, a: x * (a if isinstance(a, float) else next(a)),
        lambda x: items(),
        "of class generator, which gives something else whenever it is used. "
        "Use args[1] before the call, and pass what it gives.",
        lambda x, a: next(a),
    ),
    "file": (
        lambda x, a: x * float(a if isinstance(a, str) else a.readline()),
        lambda x: io.StringIO("2.0\n"),
        "a file (StringIO). Read args[1] before the call, and pass what you have read.",
        lambda x, a: a.readline(),
    ),
    "dataclass": (
        scaled,
        lambda x: Plain(2.0),
        "a Plain, a dataclass that may change from call to call. "
        "Make it a @dataclass(frozen=True), whose fields hold tuples instead of lists.",
        lambda x, a: Frozen(2.0),
    ),
    "frozen dataclass": (
        lambda x, a: summed(x, a.scales),
        lambda x: OfList([2.0, 1.0]),
        "an OfList, of which args[1].scales may change from call to call. Make args[1].scales a tuple.",
        lambda x, a: OfList((2.0, 1.0)),
    ),
    "dataclass of tensors": (
        weighted,
        OfTensor,
        "an OfTensor, a dataclass that may change from call to call. Pass its tensors and numbers instead, or call "
        "torch.export.register_dataclass(OfTensor) once, which makes its fields arguments; if it is the same object "
        "at every call, as self is, make it a @dataclass(eq=False).",
        lambda x, a: Registered(a.weight, a.scale),
    ),
    "object": (
        scaled,
        lambda x: Valued(2.0),
        "a Valued, of which Python makes no hash, as it may change from call to call. "
        "Pass its tensors and numbers instead, in a dict or a tuple, or define __hash__ in its class.",
        lambda x, a: Hashed(2.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_what_is_said_and_what_helps(device: torch.device, kind: str) -> None:
    function, make, text, mend = CASES[kind]
    x = torch.ones(3, device=device)
    fast = pygraph.jit(function)
    assert torch.equal(fast(x, make(x)), function(x, make(x)))
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert fallback["reason"] == f"args[1] is {text}"
    strict = pygraph.jit(function, strict=True)
    with pytest.raises(FallbackError) as caught:
        strict(x, make(x))
    assert str(caught.value).startswith(f"{function.__name__}(…): args[1] is {text} strict=True refuses")
    mended = mend(x, make(x))
    for _ in range(3):
        assert torch.equal(strict(x, mended), function(x, make(x)))
    assert strict.cache_info()[:3] == (2, 1, 1)


def test_a_dataclass_that_is_the_same_at_every_call(device: torch.device) -> None:
    fast, x = pygraph.jit(weighted, strict=True), torch.ones(3, device=device)
    model = WithoutEquality(x)
    for scale in (2.0, 2.0, 3.0, 3.0):
        model.scale = scale
        assert torch.equal(fast(x, model), weighted(x, model))
    assert fast.cache_info().captures == 1


def test_a_registered_dataclass_has_its_fields_as_arguments(device: torch.device) -> None:
    fast, x = pygraph.jit(weighted, strict=True), torch.ones(3, device=device)
    for scale in (2.0, 3.0, 4.0):
        value = Registered(x * scale, scale)
        assert torch.equal(fast(x, value), weighted(x, value))
    assert fast.cache_info().captures == 1


def test_a_path_is_as_the_user_writes_it(device: torch.device, tmp_path: Path) -> None:
    fast, x = pygraph.jit(lambda x, **kwargs: x * 2, strict=True), torch.ones(3, device=device)
    with pytest.raises(FallbackError, match=r"^<lambda>\(…\): kwargs\['config'\]\['a'\]\[1\] is a NumPy array of <U1"):
        fast(x, config={"a": [1, TEXTS]})
    path = tmp_path / "a.txt"
    path.write_text("1")
    with path.open() as file, pytest.raises(FallbackError, match=r": kwargs\['file'\] is a file \(TextIOWrapper\)\. "):
        fast(x, file=file)


def test_a_call_that_autograd_differentiates_says_the_same(device: torch.device) -> None:
    fast, x = pygraph.jit(summed), torch.ones(3, device=device)
    torch.func.grad(lambda x: fast(x, {1.0, 2.0}).sum())(x)
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert fallback["reason"] == f"args[1] is {CASES['set'][2]}"
