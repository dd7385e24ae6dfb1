"""``torch.equal`` of tensors on the device is a question, as ``if`` of one is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pygraph
from tests.steps import assert_same


def by_function(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 if torch.equal(x, y) else y * 3


def by_method(x: Tensor, y: Tensor) -> Tensor:
    return x + int(x.equal(y * 1))


def of_itself(x: Tensor, y: Tensor) -> Tensor:
    """On CUDA NaN in the same memory is equal."""
    return (x if torch.equal(x, x.view(3)) else y) + 1


def of_other_values(x: Tensor, y: Tensor) -> Tensor:
    return (x if torch.equal(x, x * 1) else y) + 1


def of_other_shapes(x: Tensor, y: Tensor) -> Tensor:
    return (x if torch.equal(x, y[:2]) else y) + 1


def of_nothing(x: Tensor, y: Tensor) -> Tensor:
    return (x if torch.equal(x[:0], y[:0]) else y) + 1


def until_it_stays(x: Tensor, y: Tensor) -> Tensor:
    while not torch.equal(x, x.clamp(max=1)):
        x = x / 2
    return x + y


@pytest.mark.parametrize(
    "fn", [by_function, by_method, of_itself, of_other_values, of_other_shapes, of_nothing, until_it_stays]
)
def test_equal_tensors(device: torch.device, fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    fast = pygraph.jit(fn)
    for step in range(10):
        x = torch.full((3,), float(step % 3), device=device)
        y = torch.full((3,), float(step % 2), device=device)
        if step == 6 and fn is not until_it_stays:
            x[1] = float("nan")
        assert_same(fast(x, y).nan_to_num(9.0), fn(x, y).nan_to_num(9.0), device)
    assert "gives a value of the host" not in str(fast.explain())
    assert fast.cache_info().captures > 0
