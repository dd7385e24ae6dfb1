"""``float(t)`` of a tensor in a traced function: a live number, as of ``t.item()``."""

from __future__ import annotations

import doctest
import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.tracing import number_classes
from pygraph.tracing.function_proxies import original_of
from pygraph.tracing.number_classes import FloatClass

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: x * (0.5 * float(x.sum()) + 1),
    "of a sum of integers": lambda x: x * float((x > 1).sum()),
    "an int": lambda x: x * int((x > 1).sum()),
    "an int of a float": lambda x: x * int(x.sum()),
    "of text": lambda x: x * float("1.5") * int("7", 8),
    "infinity": lambda x: x.clamp(max=float("inf")),
    "of a number": lambda x: x * float(3) * int(2.7),
    "is one": lambda x: x * 2 if isinstance(float(x.sum()), float) and not isinstance(x, (int, float)) else x,
    "is an int": lambda x: x * 2 if isinstance(int((x > 1).sum()), int) else x,
    "is a subclass": lambda x: x * 2 if issubclass(bool, int) and not issubclass(int, float) else x,
    "mapped": lambda x: x * sum(map(float, x[:2])),
    "compared": lambda x: x * 2 if float(x.sum()) > 4 else x - float(x.mean()),
    "a method of it": lambda x: x * float.fromhex("0x1.8p1") * int.from_bytes(b"a", "big"),
    "in a text": lambda x: {"n0": x, "n1": x * 2, "n2": x * 3}[f"n{int((x > 1).sum()) % 3}"],
    "an index": lambda x: [x, x * 2, x * 3][int((x > 1).sum()) % 3],
    "returned": lambda x: (float(x.sum()), int((x > 1).sum()), float((x > 1).sum())),
    "twice": lambda x: float(float(x.sum())) + int((x > 1).sum().item()),
    "of several": lambda x: float(x),
}


def outcome(function: Callable[[Tensor], Any], x: Tensor) -> str:
    """The text of what a function returns or raises."""
    try:
        return repr(function(x))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_in_eager(device: torch.device, name: str) -> None:
    function = FUNCTIONS[name]
    fast = pygraph.jit(function)
    for k in range(8):
        x = torch.arange(3.0, device=device) * (k % 5) / 2
        assert outcome(fast, x) == outcome(function, x)
    assert not {"float", "int"} & globals().keys()  # where the proxies were found


def of_callees(x: Tensor) -> Tensor:
    def scaled(value: Tensor) -> Any:
        return float(value.sum()) * 0.5

    class Meter:
        def __init__(self) -> None:
            self.total = 0.0

        def update(self, value: Tensor) -> None:
            self.total += float(value.mean())

    meter = Meter()
    for k in range(3):
        meter.update(x + k)
    return x * scaled(x) + meter.total


def test_numbers_of_callees_stay_live(device: torch.device) -> None:
    fast = pygraph.jit(of_callees)
    for k in range(6):
        x = torch.arange(3.0, device=device) + k
        torch.testing.assert_close(fast(x), of_callees(x))
    assert fast.cache_info().misses == 1


def test_a_module_that_does_more_with_the_class_is_left_as_it_is(device: torch.device) -> None:
    source = "def function(x):\n    return x.to(float) * float(x.sum())\n"
    module = types.ModuleType("another")
    exec(compile(source, __file__, "exec"), vars(module))
    fast = pygraph.jit(module.function)
    for k in range(5):
        x = torch.arange(3.0, device=device) + k
        torch.testing.assert_close(fast(x), module.function(x))


def test_a_variable_of_that_name_is_the_modules(device: torch.device) -> None:
    module = types.ModuleType("another")
    vars(module)["float"] = lambda value: 3.0
    exec("def function(x):\n    return x * float(x.sum())\n", vars(module))
    fast, x = pygraph.jit(module.function), torch.ones(3, device=device)
    for _ in range(3):
        torch.testing.assert_close(fast(x), x * 3)


def test_torch_warns_of_a_tensor_that_requires_grad() -> None:
    """Once in a process, so that it is not known here; to have it warn is no error."""
    x = torch.ones(1, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert float(pygraph.jit(lambda y: float(y.sum()) * 2)(x)) == 2.0


def test_proxies_outside_of_a_trace() -> None:
    proxy: Any = FloatClass(float)
    assert proxy(3) == 3.0
    assert original_of(proxy) is float
    assert {float: 2}[proxy] == 2
    assert isinstance(1.5, proxy)
    assert not isinstance(1, proxy)
    assert math.isnan(proxy("nan"))


def test_examples() -> None:
    found = doctest.testmod(number_classes)
    assert found.attempted
    assert not found.failed


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "next to an attribute": lambda y: float(y.float().sum()) / len(y),
    "of integers": lambda y: int((y > 0).sum()),
    "float of integers": lambda y: float((y > 0).sum()) / 3,
    "on the host": lambda y: float((y > 0).cpu().sum()),
}


@pytest.mark.parametrize("name", KEPT)
def test_numbers_that_are_kept_make_no_other_calls(device: torch.device, name: str) -> None:
    def make(run: Callable[..., Any]) -> Any:
        kept: list[Any] = []

        def function(x: Tensor) -> Tensor:
            kept.append(KEPT[name](x - 2))
            return x * 2

        call = run(function)
        results = [call(torch.arange(4.0, device=device) * k) for k in range(8)]
        return call, results, kept

    (fast, *mine), (_, *expected) = make(pygraph.jit), make(lambda fn: fn)
    torch.testing.assert_close(mine, expected)
    assert [type(one) for one in mine[1]] == [type(one) for one in expected[1]]
    assert fast.cache_info().hits >= 4, str(fast.explain())


def test_numbers_that_are_counted_from_a_live_one(device: torch.device) -> None:
    """As a schedule counts the batches of all epochs."""

    def epoch(batches: list[Tensor], number: int) -> Tensor:
        total = torch.zeros((), device=device)
        for step, x in enumerate(batches, start=number * len(batches)):
            total = total + x.sum() * (0.5 * step / 7)
        for step, x in enumerate(batches, number):
            total = total - x.mean() * step
        return total

    fast = pygraph.jit(epoch)
    for number in range(8):
        batches = [torch.full((3,), float(number + k), device=device) for k in range(2)]
        torch.testing.assert_close(fast(batches, number), epoch(batches, number))
    assert fast.cache_info().captures <= 2
    assert fast.cache_info().hits >= 4


def test_either_class_of_numbers(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, k: x * 2 if isinstance(k, int | float) and issubclass(type(k), float | int) else x)
    for number in range(4):
        assert fast(torch.ones(2, device=device), 0.5 + number).tolist() == [2, 2]
    assert fast.cache_info().captures == 1
