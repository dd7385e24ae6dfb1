"""Functions that catch an error which only a trace raises: they run as they are, where eager raises none."""

from __future__ import annotations

import collections
import contextlib
import decimal
import json
import random
import statistics
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.errors import FallbackError, UndecidedError


def integer(x: Tensor) -> Any:
    return int(x.sum())


def looped(x: Tensor) -> Any:
    return sum(1 for _ in range(int(x.sum())))


def copied(x: Tensor) -> Any:
    return x.sum().cpu().numpy().item()


def item(x: Tensor) -> Any:
    return round(x.sum().item())


def equal(x: Tensor) -> Any:
    return 3 if torch.equal(x, x + 0) else 4


def address(x: Tensor) -> Any:
    return 1 if x.data_ptr() else 2


def text(x: Tensor) -> Any:
    return len(str(x))


def text_of_number(x: Tensor) -> Any:
    return len(str(x.sum().item()))


def index(x: Tensor) -> Any:
    return [1, 2, 3, 4, 5, 6, 7][int(x.sum().item())]


ASKED = {one.__name__: one for one in (integer, looped, copied, item, equal, address, text, text_of_number, index)}
CAUGHT: dict[str, type[Exception] | tuple[type[Exception], ...]] = {
    "RuntimeError": RuntimeError, "Exception": Exception, "several": (RuntimeError, ValueError, TypeError),
    "suppressed": RuntimeError,
}  # fmt: skip


@pytest.mark.parametrize("kind", CAUGHT)
@pytest.mark.parametrize("asked", ASKED)
def test_the_branch_of_an_error_is_not_taken(device: torch.device, asked: str, kind: str) -> None:
    ask: Callable[[Tensor], Any] = ASKED[asked]

    def function(x: Tensor) -> Tensor:
        n = -100
        if kind == "suppressed":
            with contextlib.suppress(RuntimeError):
                n = ask(x)
            return x + n
        try:
            n = ask(x)
        except CAUGHT[kind]:
            n = -200
        return x + n

    fast = pygraph.jit(function)
    for value in (1.0, 2.0, 2.0, 3.0):
        x = torch.full((2,), value, device=device)
        torch.testing.assert_close(fast(x), function(x))


TABLE = {0: 1.0, 1: 2.0, 5: 3.0}

WITH_NUMBERS: dict[str, Callable[[Tensor, int], Any]] = {
    "key": lambda y, k: TABLE[k],
    "hash": lambda y, k: hash((k, 1)),
    "set": lambda y, k: k in {1, 2},
    "counter": lambda y, k: collections.Counter([k]),
    "seed": lambda y, k: random.Random(k).random(),
    "length": lambda y, k: collections.deque([1], maxlen=k),
    "mean": lambda y, k: statistics.mean([k, 2]),
    "decimal": lambda y, k: decimal.Decimal(k),
    "json": lambda y, k: json.dumps(y.tolist()),
    "bytes": lambda y, k: struct.pack("f", y[0].item()),
    "shared memory": lambda y, k: y.share_memory_(),
    "storage": lambda y, k: y.untyped_storage().data_ptr(),
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_errors_of_code_that_does_not_know_a_number(device: torch.device, name: str) -> None:
    ask = WITH_NUMBERS[name]

    def function(x: Tensor, k: int) -> Tensor:
        y = x * 2
        try:
            ask(y, k)
            y = y + 1
        except Exception:
            y = y * 100
        else:
            y = y - 3
        with contextlib.suppress(Exception):
            ask(y, k + 1)
            y = y + 5
        return y

    fast = pygraph.jit(function)
    for k in range(7):
        x = torch.full((2,), 1.0 + k % 3, device=device)
        torch.testing.assert_close(fast(x, k), function(x, k))


def test_a_list_that_grows_in_a_try(device: torch.device) -> None:
    def make(run: Callable[..., Any]) -> list[Any]:
        events: list[int] = []
        total = torch.zeros(3, device=device)

        def function(x: Tensor) -> None:
            with contextlib.suppress(Exception):
                events.append(len(events))
                total.add_(x)
            total.mul_(2)

        call, found = run(function), list[Any]()
        for number in range(6):
            call(torch.full((3,), float(number), device=device))
            found.append((total.clone(), [*events]))
        return found

    torch.testing.assert_close(make(pygraph.jit), make(lambda fn: fn))


def test_errors_of_the_users_own_are_caught_in_a_graph(device: torch.device) -> None:
    def fails(k: Any) -> Any:
        raise TypeError("no such kind")

    def function(x: Tensor, k: int) -> Tensor:
        try:
            return fails(k)
        except TypeError:
            return x * k

    fast = pygraph.jit(function)
    for k in (2, 3, 4, 5, 6):
        x = torch.ones(2, device=device)
        torch.testing.assert_close(fast(x, k), function(x, k))
    assert fast.cache_info().hits >= 3


def test_a_trace_says_what_was_caught(device: torch.device) -> None:
    def function(x: Tensor) -> Tensor:
        try:
            return x + int(x.sum())
        except RuntimeError:
            return x

    x = torch.ones(2, device=device)
    with pytest.raises(UndecidedError, match="it catches the error, which is none in eager"):
        pygraph.trace(function)(x)
    with pytest.raises(FallbackError, match=r"it needs a value on the host. From test_caught_errors.py"):
        pygraph.jit(function, strict=True)(x)


def test_other_errors_may_be_caught(device: torch.device) -> None:
    """Python's own, and those that an operator raises in eager, too."""

    def function(x: Tensor) -> Tensor:
        with contextlib.suppress(KeyError):
            x = {}["missing"]
        return x * 2

    def wrong_shapes(x: Tensor) -> Tensor:
        try:
            return x @ torch.ones(7, 7, device=x.device)
        except RuntimeError:
            return x * 2

    fast, also = pygraph.jit(function), pygraph.jit(wrong_shapes)
    for _ in range(3):
        x = torch.ones(2, device=device)
        assert torch.equal(fast(x), x * 2)
        assert torch.equal(also(x), x * 2)
    assert fast.cache_info().captures == 1
    assert fast.explain().counted_fallbacks() == {}


def test_texts_of_errors_that_name_the_class_of_a_tensor(device: torch.device) -> None:
    texts: list[str] = []

    def function(x: Tensor) -> Any:
        try:
            found = torch.distributions.Normal(x, 1.0)
        except ValueError as error:
            texts.append(str(error)[:40])
            return x * 2, str(error)[:60]
        return found.mean * 3, f"{type(x).__name__}"

    fast = pygraph.jit(function)
    for value in (1.0, torch.nan, 2.0, torch.nan, torch.nan):
        x = torch.full((2,), value, device=device)
        (y, text), (expected, other) = fast(x), function(x)
        torch.testing.assert_close(y, expected, equal_nan=True)
        assert text == other
    assert texts[::2] == texts[1::2]


@pytest.mark.parametrize("wrong", [lambda x, n: n[:, 1:], lambda x, n: n + str(x.shape), lambda x, n: len(n)])
def test_an_error_about_pythons_own_objects_is_eagers(device: torch.device, wrong: Callable[..., Any]) -> None:
    """Also in a function that reads a number of the device, whose class such an error would name."""
    weight = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.125)

    def step(x: Tensor) -> float:
        total: Any = 0
        try:
            total = wrong(x, total)
        except TypeError:
            total = 1
        loss = (x * weight * total).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    fast = pygraph.jit(step)
    assert [fast(torch.ones(1, 3, device=device)) for _ in range(5)] == [3.0, 2.625, 2.25, 1.875, 1.5]
    assert "none in eager" not in str(fast.explain().to_dict())
    assert fast.cache_info().captures == 1
