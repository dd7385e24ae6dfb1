"""Random integers up to a live number: one trace for all bounds, and the numbers that eager draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from tests.steps import assert_same


def up_to(n: int, x: Tensor) -> Tensor:
    return x[torch.randint(n, (4,), device=x.device)]


def between(n: int, x: Tensor) -> Tensor:
    return x[torch.randint(n - 3, n, (2, 4), device=x.device)] + torch.rand(4, device=x.device)


def by_name(n: int, x: Tensor) -> Tensor:
    y = torch.nn.functional.dropout(x, 0.5)
    return y[torch.randint(size=[3], high=n, dtype=torch.int32, device=x.device).long()] + torch.randn(
        3, device=x.device
    )


def on_the_host(n: int, x: Tensor) -> Tensor:
    return x[torch.randint(0, n, (4,))]


class Buffer:
    """A buffer on the device that fills, of which a step takes samples."""

    def __init__(self, device: torch.device) -> None:
        self.size, self.values = 4, torch.arange(64.0, device=device)

    def step(self, x: Tensor) -> Tensor:
        self.size += 1
        return self.values[torch.randint(0, self.size, (8,), device=x.device)] * x.sum()


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("fn", [up_to, between, by_name, on_the_host])
def test_all_bounds_have_one_trace(device: torch.device, fn: Callable[..., Any], fuse: bool) -> None:
    fast, results = pygraph.jit(fn, fuse=fuse), list[list[Tensor]]()
    for call in (fn, fast):
        torch.manual_seed(1)
        results.append([])
        for n in range(5, 15):
            results[-1].append(call(n, torch.arange(20.0, device=device)))
    assert_same(results[1], results[0], device)
    assert fast.cache_info().size <= (1 if fn is not on_the_host else 3), fast.explain_misses()


def test_a_buffer_that_fills(device: torch.device) -> None:
    results: list[list[Tensor]] = []
    for compiles in (False, True):
        buffer = Buffer(device)
        step = pygraph.jit(buffer.step) if compiles else buffer.step
        torch.manual_seed(1)
        results.append([step(torch.ones(3, device=device)) for _ in range(12)])
        assert buffer.size == 16
        if compiles:
            assert step.cache_info().hits >= 7, step.explain_misses()
    assert_same(results[1], results[0], device)


def test_bounds_that_are_none(device: torch.device) -> None:
    fast, x = pygraph.jit(up_to), torch.arange(20.0, device=device)
    fast(5, x)
    fast(6, x)
    with pytest.raises(RuntimeError, match="random_ expects 'from' to be less than 'to'"):
        fast(0, x)
    fast(7, x)
