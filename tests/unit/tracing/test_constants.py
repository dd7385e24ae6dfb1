"""Small tensors on the host, in operations with numbers of the device: what Python decides by them is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pygraph


def by_sum(x: Tensor) -> Tensor:
    s = torch.tensor(0.0) + x.norm().item()
    return x + 1 if s < 1.0 else x - 1


def by_item_of_product(x: Tensor) -> Tensor:
    s = torch.tensor(1.0) * x.norm().item()
    return x + 1 if s.item() < 1.0 else x - 1


def by_updated(x: Tensor) -> Tensor:
    s = torch.tensor([0.25, 0.5])
    view = s[:1]
    s.mul_(x.norm().item())
    return x + 1 if view < 0.25 else x - 1


def by_choice(x: Tensor) -> Tensor:
    s = torch.where(torch.tensor(True), torch.tensor(0.5), x.norm().item())
    limit = torch.tensor([2.0]).clamp(max=x.norm().item())
    return x + 1 if limit > s else x - 1


def by_turns(x: Tensor) -> Tensor:
    s, limit = torch.tensor(0.0), torch.tensor(2.0)
    while s < limit:
        s = s + float(x.norm())
        x = x + 1
    return x


def by_integer(x: Tensor) -> Tensor:
    s = torch.tensor(0.0) + int(x.norm())
    return x + 1 if s < 1 else x - 1


@pytest.mark.parametrize("fn", [by_sum, by_item_of_product, by_updated, by_choice, by_turns, by_integer])
def test_decisions(device: torch.device, fn: Callable[[Tensor], Tensor]) -> None:
    fast = pygraph.jit(fn)
    for value in (0.1, 0.2, 2.0, 0.3, 3.0, 0.2):
        x = torch.full((4,), value, device=device) / 2
        torch.testing.assert_close(fast(x), fn(x))


def test_numbers_of_the_host(device: torch.device) -> None:
    def fn(x: Tensor, k: float) -> Tensor:
        s = torch.tensor(0.0) + k
        y = x * torch.clamp(torch.tensor(1.0) * k, max=1.0).item()
        return y + 1 if s < 1.0 else y - 1

    fast, x = pygraph.jit(fn), torch.ones(4, device=device)
    for k in (0.5, 0.25, 2.0, 0.75, 3.0):
        torch.testing.assert_close(fast(x, k), fn(x, k))


def test_constants_stay_known_where_all_is_known(device: torch.device) -> None:
    def fn(x: Tensor) -> Tensor:
        s = torch.tensor(0.5)
        y = x * (s + x.norm().item())
        return y + 1 if s < 1 else y - 1

    fast, x = pygraph.jit(fn), torch.ones(4, device=device)
    for _ in range(3):
        torch.testing.assert_close(fast(x), fn(x))
    assert "decision" not in str(fast.explain())
