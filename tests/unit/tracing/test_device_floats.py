"""Floats of the device in Python: NaN, infinities and rounding are those of eager, and not of algebra."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pygraph

INF, NAN = math.inf, math.nan

SINGLE: dict[str, Callable[[Any], Any]] = {
    "is not itself": lambda v: v != v,
    "is itself": lambda v: v == v,
    "is no less": lambda v: not v >= v,
    "difference": lambda v: (v - v, v - v + 1, v - v != 0),
    "quotient": lambda v: (v / v, 1 / v, 0.1 / v),
    "product with zero": lambda v: (v * 0, 0.0 * v, v * -0.0),
    "rounded twice": lambda v: ((v + 0.1) + 0.2, v + 0.3, (v * 0.1) * 3, v * 0.3, v * 3 / 3, (v + 1e16) - 1e16),
    "plus zero": lambda v: (v + 0.0, 0.0 - v, -v, -(v * -1), abs(v)),
    "is more": lambda v: (v + 1 > v, v * v >= 0, v > -INF),
    "power": lambda v: (v**2, v**0.5, v**3.0, v**0, v**1),
    "large power": lambda v: v**400,
    "power of it": lambda v: (2**v, v**-1),
    "remainder": lambda v: (v // 0.3, v % 0.3, divmod(v, -0.7), 5 % v),
    "rounded": lambda v: (round(v, 2), round(v), int(v), math.floor(v)),
    "rounded to digits": lambda v: (round(v, 3), round(v, -1)),
    "roots": lambda v: math.sqrt(v),
    "logarithm": lambda v: (math.log(v), math.log10(v)),
    "exponential": lambda v: math.exp(v),
    "of math": lambda v: (math.tanh(v), math.fabs(v), math.atan(v), math.erf(v)),
    "sine": lambda v: (math.sin(v), math.cos(v)),
    "checks": lambda v: (math.isnan(v), math.isinf(v), math.isfinite(v)),
    "check": lambda v: 1 if not math.isfinite(v) else 2,
    "truth": lambda v: (bool(v), not v, v and 3, v or 4),
    "least and most": lambda v: (min(v, 1.0), max(v, 0.5), min(max(v, 0.1), 2.0)),
    "sum": lambda v: (sum([v, v, 1]), sum([v], 0.5)),
    "large integers": lambda v: v * 2**70,
    "too large integers": lambda v: v * 10**400,
    "of numpy": lambda v: bool(np.isnan(v)),
}

VALUES = (1.5, 0.1, NAN, 2.7, INF, -3.25, 0.0, -INF, -0.0, NAN, 88.5, 7.7, 1e30, 1.5)


def outcome(function: Callable[..., Any], *args: Any) -> str:
    """The text of what a function returns, to the last bit, or of the error that it raises."""
    try:
        found = function(*args)
    except (ArithmeticError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return repr([one.tolist() if isinstance(one, torch.Tensor) else one for one in (found, args)])


@pytest.mark.parametrize("kind", ["item", "float"])
@pytest.mark.parametrize("name", SINGLE)
def test_as_in_eager(device: torch.device, name: str, kind: str) -> None:
    compute = SINGLE[name]

    def by_item(x: torch.Tensor) -> Any:
        return compute(x.sum().item())

    def by_float(x: torch.Tensor) -> Any:
        return compute(float(x.sum()))

    function = by_item if kind == "item" else by_float
    fast = pygraph.jit(function)
    for value in VALUES:
        x = torch.tensor([value], device=device)
        assert outcome(fast, x) == outcome(function, x), value


@pytest.mark.parametrize("name", ["difference", "product with zero", "rounded twice", "plus zero", "power"])
def test_in_tensors(device: torch.device, name: str) -> None:
    compute = SINGLE[name]

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        found = compute(x.sum().item())
        return torch.stack([y * one for one in found if not isinstance(one, (bool, complex))])

    fast = pygraph.jit(function)
    y = torch.tensor([1.0, 0.0, -3.0], dtype=torch.float64, device=device)
    for value in VALUES:
        x = torch.tensor([value], device=device)
        assert outcome(fast, x, y) == outcome(function, x, y), value


def test_a_check_for_nan_takes_no_step(device: torch.device) -> None:
    weight = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        value = loss.item()
        if value != value or value - value != 0:
            return -1.0
        loss.backward()
        optimizer.step()
        return value

    fast = pygraph.jit(step)
    bad, good = torch.tensor([NAN, 1, 1], device=device), torch.ones(3, device=device)
    for x in (good, good, bad, good, bad, bad * 0 + INF, good):
        before = weight.detach().clone()
        with torch.no_grad():
            expected = (before * x).sum().item()
        found = fast(x)
        if math.isfinite(expected):
            assert found == expected
            assert torch.allclose(weight.detach(), before - 0.1 * x)
        else:
            assert found == -1.0
            assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, k: x * ((k * 0.1) * 3) + x * (k * (0.1 * 3)) + x * (3 * k * 0.1),
        lambda x, k: x * ((k + 1e16) - 1e16) + (0.1 - k + k),
        lambda x, k: (x * (k / 3 - k / 3), x * (-0.0 * k)),
        lambda x, k: x * (k * 1e308 * 10),
        lambda x, k: x * (k + 0.0),
        lambda x, k: (x.add(x, alpha=k * 3 / 3), k * 3 / 3, (k + 0.1) + 0.2 == k + 0.3),
    ],
)
def test_numbers_that_are_passed(device: torch.device, compute: Callable[..., Any]) -> None:
    fast, x = pygraph.jit(compute), torch.linspace(-1, 2, 5, dtype=torch.float64, device=device)
    for k in (1.5, 2.7, 0.1, 3.3, -0.0, 7.7, 0.0, 1e300, INF, 5.1):
        found, expected = fast(x, k), compute(x, k)
        assert outcome(lambda one=found: one) == outcome(lambda one=expected: one)


def test_such_functions_are_graphs(device: torch.device) -> None:
    def early(x: torch.Tensor) -> torch.Tensor:
        loss = float((x * x).sum())
        scale = 0.5 * loss + min(loss, 3.0)
        return x * scale if math.isfinite(loss) else x

    fast, x = pygraph.jit(early), torch.arange(4.0, device=device)
    for k in range(6):
        assert torch.equal(fast(x + k), early(x + k))
    assert fast.cache_info().hits >= 3
