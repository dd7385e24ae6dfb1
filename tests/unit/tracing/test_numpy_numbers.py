"""NumPy's functions of live numbers: baked in, with the values and the types of eager, and never an error."""

from __future__ import annotations

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
