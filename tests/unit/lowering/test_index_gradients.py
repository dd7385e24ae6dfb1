"""Gradients of an index: added up in place, and not checked again, where autograd adds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.lowering.aten import lower

aten = torch.ops.aten
Fn = Callable[..., Any]


def gradient(pick: Fn) -> Fn:
    """The gradient of the squares of what a function picks out of its first argument."""

    def fn(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(pick(x, *others).square().sum(), x)
        return found

    return fn


def rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x[at]


def columns(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x[:, at]


def cells(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x[at, at.flip(0) % 4]


def twice(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x[at] * 2 + x[at].sin()


def by_user(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Whose positions nothing has checked."""
    return x.new_zeros(x.shape).index_put((at,), x[:6], accumulate=True)


def by_user_elsewhere(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Whose positions are right in a larger tensor."""
    return torch.cat([x, x])[at] + x.new_zeros(x.shape).index_put((at,), x[:6], accumulate=True)[:6]


def read_before(x: torch.Tensor, at: torch.Tensor) -> Any:
    """Whose zeros are a result of their own."""
    zeros = x.new_zeros(x.shape)
    return x[at].sum(), zeros, zeros.index_put((at,), x[:6], accumulate=True)


IN_PLACE = [gradient(rows), gradient(columns), gradient(cells), gradient(twice)]
NAMES = ["rows", "columns", "cells", "twice"]
CHECKED = [by_user, by_user_elsewhere, read_before]


def lowered(fn: Fn, *args: torch.Tensor) -> list[Any]:
    return [node.target for node in lower(pygraph.trace(fn)(*args)).nodes]


def arguments(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8).to(device), torch.tensor([3, 1, 3, 0, 7, 3]).to(device)


@pytest.mark.parametrize("fn", IN_PLACE, ids=NAMES)
def test_in_place(device: torch.device, fn: Fn) -> None:
    targets = lowered(fn, *arguments(device))
    assert aten._index_put_impl_.default in targets
    assert aten.index_put.default not in targets


@pytest.mark.parametrize("fn", CHECKED)
def test_checked(device: torch.device, fn: Fn) -> None:
    targets = lowered(fn, *arguments(device))
    assert aten._index_put_impl_.default not in targets
    assert aten.index_put.default in targets


@pytest.mark.parametrize("fn", [*IN_PLACE, *CHECKED], ids=[*NAMES, *(fn.__name__ for fn in CHECKED)])
def test_results_are_those_of_eager(device: torch.device, fn: Fn) -> None:
    fast = pygraph.jit(fn)
    for _ in range(4):
        args = arguments(device)
        torch.testing.assert_close(fast(*args), fn(*args))
    assert fast.cache_info().captures == 1
