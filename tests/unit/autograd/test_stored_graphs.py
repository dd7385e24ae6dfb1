"""Attributes and items of lists that a call stores with a graph of autograd, through which it is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.calls import retries


class Attention(nn.Module):
    """Stores its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.weights = self.linear(x).softmax(-1)
        return (self.weights * x).relu()

    def loss(self, y: Tensor) -> Tensor:
        return y.sum() + self.weights.square().sum()


class Several(Attention):
    """Stores what it returns, a view of it, and containers of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        self.y, self.row, self.more = y, y[0], {"y": y, "list": [y * 2]}
        return y

    def loss(self, y: Tensor) -> Tensor:
        assert self.y is y
        assert self.more["y"] is y
        return y.sum() + self.row.sum() * 2 + self.more["list"][0].square().sum()


class Nested(Attention):
    """Calls modules that store something."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Several()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum() + self.first.weights.sum()

    def loss(self, y: Tensor) -> Tensor:
        return y + self.first.weights.square().sum() + self.second.row.sum()


class Auxiliary(Attention):
    """Collects losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.losses.append(y.square().mean())
        return y

    def loss(self, y: Tensor) -> Tensor:
        total = y.sum() + torch.stack(self.losses).sum()
        self.losses.clear()
        return total


class Recurrent(Attention):
    """Goes on from what it has stored, with its graph, which is detached from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.linear(x) + (0 if self.hidden is None else self.hidden))
        return self.hidden * 2

    def loss(self, y: Tensor) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.calls += 1
        if self.calls % 3 or self.hidden is None:
            return None
        self.hidden = self.hidden.detach()
        return y.sum()


def played(device: torch.device, make: Callable[[], Any], jitted: bool, without: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module, found = make().to(device), list[Any]()
    run = pygraph.jit(module) if jitted else module
    for i in range(9):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(i)).to(device)
        with torch.set_grad_enabled(not without or i % without != 1):
            y = run(x)
        loss = module.loss(y)
        module.zero_grad()
        if loss is not None and loss.requires_grad:
            loss.backward()
        found.append((y, [parameter.grad for parameter in module.parameters()]))
    return run, found


@pytest.mark.parametrize("without", [0, 2])
@pytest.mark.parametrize("make", [Attention, Several, Nested, Auxiliary, Recurrent])
def test_as_in_eager(
    device: torch.device, make: Callable[[], Any], without: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "clock", lambda: 0.0)  # however busy the machine is, there is time for traces
    fast, found = played(device, make, True, without)
    torch.testing.assert_close(found, played(device, make, False, without)[1])
    assert fast.cache_info().captures > 0


def test_graphs_of_calls_are_not_chained(device: torch.device) -> None:
    module = Attention().to(device)
    fast, counts = pygraph.jit(module), list[int]()
    for _ in range(6):
        queue, seen = [fast(torch.ones(2, 3, device=device)).grad_fn], set[Any]()
        while queue:
            node = queue.pop()
            if node is not None and node not in seen:
                seen.add(node)
                queue += [following for following, _ in node.next_functions]
        counts.append(len(seen))
    assert len(set(counts[1:])) == 1
