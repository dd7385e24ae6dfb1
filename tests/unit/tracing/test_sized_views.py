"""Views whose sizes data decides, in functions that decide by values on the device: updates of them, and of others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph

VALUES = (2, 3, 2, 4, 3, 2)


def erased(x: Tensor, state: Tensor) -> Tensor:
    """Random erasing, as libraries of augmentations do it."""
    i, size = random.randint(0, 4), int(x[0])
    y = torch.zeros(6, device=x.device)
    y[i : i + size] = 1
    return y


def multiplied(x: Tensor, state: Tensor) -> Tensor:
    y = x.clone()
    y[: int(x[0])].mul_(3)
    return y


def through_views(x: Tensor, state: Tensor) -> Tensor:
    y = x.clone()
    y[1 : int(x[0])].view(-1).add_(5)
    return y


def of_two_parts(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    n, y = int(x[0]), x.clone()
    y.narrow(0, 0, n).zero_()
    return y[:n], y[n:]


def state_after_it_was_read(x: Tensor, state: Tensor) -> Tensor:
    total = state[: int(x[0])].sum()
    state.add_(1)
    return total


def state_before_it_is_read(x: Tensor, state: Tensor) -> Tensor:
    part = state[: int(x[0])]
    state.add_(1)
    return part * 1


def state_before_a_view_is_read(x: Tensor, state: Tensor) -> Tensor:
    part = state[: int(x[0])][:1]
    state.add_(1)
    return part * 1


def part_of_state(x: Tensor, state: Tensor) -> Tensor:
    return state[: int(x[0])]


def part_and_whole(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    y = x.clone()
    return y, y[: int(x[0])]


def two_parts_that_overlap(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    n, y = int(random.uniform(2, 4)), x.clone()
    return y[:n], y[-random.randint(2, 5) :]


def in_a_loop(x: Tensor, state: Tensor) -> Tensor:
    n, y = x[0].int().item(), torch.zeros(6, device=x.device)
    y[n : n + 2] = 1
    for _ in range(int(n)):
        y = y + 10
    return y


def own_memory(x: Tensor, state: Tensor) -> Tensor:
    y = x[x > 2.5]
    y.add_(1)
    return y


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    one.__name__: one
    for one in (
        erased, multiplied, through_views, of_two_parts, state_after_it_was_read, state_before_it_is_read,
        state_before_a_view_is_read, part_of_state, part_and_whole, two_parts_that_overlap,
        in_a_loop, own_memory,
    )
}  # fmt: skip


@pytest.mark.parametrize("asks", [False, True], ids=["numbers alone", "a question"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_updates(device: torch.device, name: str, asks: bool) -> None:
    found: list[list[Any]] = []
    for decorate in (lambda fn: fn, pygraph.jit):
        state = torch.arange(6.0, device=device)

        def fn(x: Tensor, state: Tensor = state) -> Any:
            if asks and x.sum() > 1e9:
                return x
            return FUNCTIONS[name](x, state)

        function = decorate(lambda x, fn=fn: fn(x))
        random.seed(0)
        seen: list[Any] = []
        for value in VALUES:
            results = function(torch.full((6,), float(value), device=device))
            first = results[0] if isinstance(results, tuple) else results
            first.add_(10)  # others that share its memory see that
            seen.append([results, state.clone()])
        found.append(seen)
    torch.testing.assert_close(*found)
