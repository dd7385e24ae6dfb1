"""Sizes that data decide, asked for in Python first: what torch takes for granted behind that holds for one answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pygraph


def suppressed(x: Tensor) -> Tensor:
    """Non-maximum suppression in one dimension."""
    order, kept = x.argsort(descending=True), list[Tensor]()
    while order.numel() > 0:
        kept.append(order[0])
        distances = (x[order[:1]] - x[order[1:]]).abs()
        order = order[1:][distances > 0.3]
    return torch.stack(kept)


def first_of_some(x: Tensor) -> Tensor:
    found = x[x > 0.5]
    total = x.sum() * 0
    if found.numel() > 0:
        total = total + found[0] * 2
    return total


def first_of_more(x: Tensor) -> Tensor:
    found = x[x > 0.5]
    if len(found) == 0:
        return x * 0
    large = found[found > 0.7]
    if not large.size(0):
        return x + found[0]
    return x * large[0] + found[:1].sum()


def last(x: Tensor) -> Tensor:
    found = x[x > 0.5]
    return found[-1] + x if found.shape[0] else x - 1


@pytest.mark.parametrize("function", [suppressed, first_of_some, first_of_more, last])
def test_other_answers_are_no_errors(device: torch.device, function: Callable[[Tensor], Tensor]) -> None:
    fast = pygraph.jit(function)
    for seed in range(16):
        x = torch.rand(3, generator=torch.Generator().manual_seed(seed)).to(device)
        torch.testing.assert_close(fast(x), function(x))


def test_what_does_not_hold_is_an_error(device: torch.device) -> None:
    fast = pygraph.jit(lambda x: x[x > 0.5][0] * 2)
    for size in (3, 1, 3):
        torch.testing.assert_close(fast(torch.ones(size, device=device)), torch.full((), 2.0, device=device))
        with pytest.raises((IndexError, RuntimeError)):
            fast(torch.zeros(size, device=device))
