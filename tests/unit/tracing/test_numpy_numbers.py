"""NumPy's functions of live numbers: baked in, with the values and the types of eager, and never an error."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pygraph

KINDS = (int, float, np.float32, np.float64, np.int64)

OF_ONE: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(np, name) for name in ("sqrt", "exp", "log", "floor", "square", "negative", "reciprocal", "rint")},
    "of a sum": lambda k: np.sqrt(2 * k + 1) / 3,
    "schedule": lambda k: 0.5 * (1 + np.cos(np.pi * k / 8)),
    "in a list": lambda k: float(np.mean([k, 2.0])),
}

OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(np, name) for name in ("maximum", "hypot", "power", "arctan2", "multiply")},
    "clip": lambda a, b: np.clip(a, 0, b),
    "where": lambda a, b: float(np.where(a > b, a, b)),
    "reduce": lambda a, b: float(np.add.reduce([a, b])),
    "of a product": lambda a, b: np.sqrt(a * b),
    "array": lambda a, b: float(np.array([a, b]).sum()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OF_ONE)
def test_functions_of_a_number(device: torch.device, name: str, kind: type[Any]) -> None:
    def function(x: torch.Tensor, k: Any) -> torch.Tensor:
        return (x + 1) / OF_ONE[name](k) * 2

    x, fast = torch.ones(3, device=device), pygraph.jit(function)
    for value in (1, 4, 2, 4):
        expected, found = function(x, kind(value)), fast(x, kind(value))
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not fast.explain().to_dict()["fallbacks"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OF_TWO)
def test_functions_of_two_numbers(device: torch.device, name: str, kind: type[Any]) -> None:
    def function(x: torch.Tensor, a: Any, b: float) -> torch.Tensor:
        return (x + 1) * OF_TWO[name](a, b) + 2

    x, fast = torch.ones(3, device=device), pygraph.jit(function)
    for a, b in ((1, 2.0), (4, 2.0), (4, 3.0), (4, 3.0)):
        expected, found = function(x, kind(a), b), fast(x, kind(a), b)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not fast.explain().to_dict()["fallbacks"]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda k: (1.0 - np.clip(k / 10.0, 0.0, 1.0)) * 0.5 + np.clip(k / 10.0, 0.0, 1.0) * 0.05,
    "exponential": lambda k: 0.05 + (0.9 - 0.05) * np.exp(-1.0 * k / 7),
    "cosine": lambda k: 0.1 + 0.5 * (1 - 0.1) * (1 + np.cos(np.pi * k / 9)),
    "power": lambda k: -(np.sqrt(k + 1.0) ** 2) / 3 % 0.7,
    "interpolated": lambda k: 2 * np.interp(k, [0, 5, 10], [1.0, 0.5, 0.1]) + 1,
    "minimum": lambda k: np.minimum(1.0, 0.4 + 0.1 * k) * np.float64(0.5),
    "nested": lambda k: np.maximum(np.minimum(0.3 * k, 1.0), 0.1) - abs(np.sin(0.1 * k)),
}


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_many_steps_is_asked_for_at_once(
    device: torch.device, traces: list[str], name: str, is_kept: bool
) -> None:
    schedule = SCHEDULES[name]

    class Agent:
        rate: Any = 1.0

        def act(self, x: torch.Tensor, k: int) -> Any:
            rate = schedule(k)
            if is_kept:
                self.rate = rate
            return x * rate + 1, rate

    agent, other = Agent(), Agent()
    fast = pygraph.jit(agent.act)
    for k in (3, 3, *range(12)):
        x = torch.full((3,), float(k), device=device)
        (got, rate), (expected, expected_rate) = fast(x, k), other.act(x, k)
        assert torch.equal(got, expected), k
        for one, wanted in ((rate, expected_rate), (agent.rate, other.rate)):
            assert type(one) is type(wanted)
            assert one == wanted
    assert len(traces) <= (9 if is_kept else 4), traces


def test_a_computed_number_is_numpys_to_the_function(device: torch.device) -> None:
    """What it does with it, if that is no arithmetic."""

    def function(x: torch.Tensor, k: float) -> Any:
        rate = np.sqrt(k) * 2
        shown = f"{rate:.3f} {rate!r} {type(rate).__name__} {isinstance(rate, np.floating)}"
        pair = np.array([rate, 1.0]) + rate
        return (
            x * rate,
            shown,
            float(pair.sum()),
            {rate: "key"},
            copy.deepcopy(rate),
            math.floor(rate),
            rate > 1,
            [rate],
        )

    fast = pygraph.jit(function)
    for k in (2.0, 3.0, 0.25, 2.0):
        x = torch.ones(3, device=device)
        (got, *rest), (expected, *others) = fast(x, k), function(x, k)
        assert torch.equal(got, expected)
        assert rest == others
        assert list(map(type, rest)) == list(map(type, others))
        assert type(rest[-1][0]) is type(next(iter(rest[2]))) is np.float64


def test_a_learning_rate_of_numpy_and_numbers_of_tensors(device: torch.device) -> None:
    """Adam divides it by a number that it reads from a tensor, of whose value NumPy would ask."""

    def trained(wrap: Callable[..., Any]) -> tuple[list[float], Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = torch.nn.Linear(3, 2).to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=np.float64(0.1))

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = wrap(step)
        return [call(torch.full((4, 3), index + 1.0, device=device)).item() for index in range(6)], call

    losses, fast = trained(pygraph.jit)
    torch.testing.assert_close(losses, trained(lambda step: step)[0])
    assert "no fallbacks" in str(fast.explain())


@pytest.mark.parametrize("name", ["min", "max", "if", "between"])
def test_comparisons_with_numpys_numbers_are_outcomes(device: torch.device, name: str) -> None:
    limit = np.log(5)
    functions: dict[str, Callable[[float], Any]] = {
        "min": lambda k: min(k / 4, np.log(5)),
        "max": lambda k: max(limit, k / 4),
        "if": lambda k: k / 4 if k / 4 < limit else 2.0,
        "between": lambda k: k if np.float64(0.5) < k <= np.array(6.0) else -1.0,
    }

    def function(x: torch.Tensor, k: int) -> torch.Tensor:
        return x * float(functions[name](k))

    x, fast = torch.ones(3, device=device), pygraph.jit(function)
    for k in (1, 2, 3, 4, 5, 9, 10, 11, 12):
        torch.testing.assert_close(fast(x, k), function(x, k))
    assert fast.cache_info().misses <= 4, fast.explain_misses()
