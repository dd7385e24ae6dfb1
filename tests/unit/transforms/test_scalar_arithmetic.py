"""Arithmetic on 0-d host tensors: which of it the device does, and that results are the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pygraph
from tests import extent

Tensor = torch.Tensor

ONE = torch.tensor(1.0, dtype=torch.float64)

MOVED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sign": lambda x, k: x * torch.where(k >= 0, ONE, -ONE),
    "a size": lambda x, k: x / k.abs(),
    "numbers": lambda x, k: x * (k * torch.full((), 2.0, dtype=torch.float64)) + torch.ones(()) * k,
    "chosen constants": lambda x, k: x * torch.where(k > 0, torch.tensor(1.0), torch.tensor(-1.0)),
    "a cast": lambda x, k: x * k.float(),
    "a reciprocal": lambda x, k: x + k.reciprocal(),
    "a quotient": lambda x, k: x * (k / (k * k + ONE)),
    "extremes": lambda x, k: x * torch.maximum(k, ONE) - torch.minimum(k, ONE),
    "comparisons": lambda x, k: torch.where(k != 1, x, -x) + (k < 2),
    "a copy": lambda x, k: x + (k * 2).to(x.device),
    "two uses": lambda x, k: (x * (k + 1)) / (k + 1),
    "a result": lambda x, k: (x * 2, (k - 3).to(x.device)),
}

LEFT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rounded in several ways": lambda x, k: x * k.exp(),
    "a root": lambda x, k: x / k.abs().sqrt(),
    "returned": lambda x, k: (x * (k + 1), k + 1),
    "divided by a number": lambda x, k: x * (k / 3),
    "a vector": lambda x, k: x * (k.reshape(1) + 1).sum(),
}


def host_work(fn: Any, x: Tensor, k: Tensor) -> list[str]:
    """The regions that are no graph."""
    program = pygraph.graphify(pygraph.indirect(pygraph.devicify(pygraph.trace(fn)(x, k))))
    return [region.kind for region in program.regions if region.kind != "graph"]


@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_device_does_what_has_one_result(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    fn = MOVED[kind]
    x = torch.linspace(-2, 3, 7, device=device).to(dtype)
    fast = pygraph.jit(fn)
    for value in (2.0, 1.0, -3.5, 0.1, float("inf"), float("nan"), -0.0):
        k = torch.tensor(value, dtype=torch.float64)
        torch.testing.assert_close(fast(x, k), fn(x, k), rtol=0, atol=0, equal_nan=True)
    assert host_work(fn, x, k) == []
    assert fast.cache_info().captures == 1


@pytest.mark.parametrize("kind", LEFT)
def test_the_host_does_the_rest(device: torch.device, kind: str) -> None:
    fn = LEFT[kind]
    x = torch.linspace(-2, 3, 7, device=device)
    fast = pygraph.jit(fn)
    for value in (2.0, 1.0, -3.5, 0.1):
        k = torch.tensor(value, dtype=torch.float64)
        torch.testing.assert_close(fast(x, k), fn(x, k), rtol=0, atol=0)
    assert host_work(fn, x, k) != []


_STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: -a,
    lambda a, b: a.abs(), lambda a, b: a * torch.full((), 0.5), lambda a, b: a.reciprocal(),
    lambda a, b: torch.maximum(a, b), lambda a, b: torch.where(a > b, a, b), lambda a, b: a.float().double(),
    lambda a, b: a + 3, lambda a, b: a * 0.3,
]  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, len(_STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.floats(allow_nan=False, width=32),
    st.floats(allow_nan=False, width=32),
)
@settings(max_examples=extent.examples(40, 600), deadline=None)
def test_any_arithmetic(steps: list[tuple[int, int, int]], first: float, second: float) -> None:
    device = pygraph.default_device()

    def fn(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        values = [a, b]
        for step, left, right in steps:
            values.append(_STEPS[step](values[left % len(values)], values[right % len(values)]))
        return x * values[-1] + values[len(values) // 2]

    x = torch.linspace(-2, 3, 5, device=device)
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    program = pygraph.devicify(pygraph.trace(fn)(x, ONE, ONE + 1))
    torch.testing.assert_close(pygraph.evaluate(program, x, a, b), fn(x, a, b), rtol=0, atol=0, equal_nan=True)


def test_copies_to_the_device_as_decompositions_have_them(device: torch.device) -> None:
    """Constants among them are made on the device, or uploaded once."""

    def fn(x: Tensor) -> Tensor:
        positions, device_put = torch.arange(4) * 2.0, torch.ops.prims.device_put
        return x + device_put(positions, x.device) + device_put(positions.cos(), x.device)

    x = torch.randn(4, device=device)
    assert torch.equal(pygraph.jit(fn)(x), fn(x))
    program = pygraph.graphify(pygraph.indirect(pygraph.devicify(pygraph.trace(fn)(x))))
    assert [region.kind for region in program.regions] == ["graph"]
    assert program.fallbacks == ()
