"""Views of parameters that were made under ``no_grad``: they require grad, and lead to no parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda weight: weight.t(),
    "a slice": lambda weight: weight[:2].t(),
    "expanded": lambda weight: weight[0].expand(3, 3),
}


class Cache:
    """What a model keeps of its parameters for predictions, as GPyTorch does."""

    def __init__(self, device: torch.device, view: Callable[[Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 3, device=device))
        with torch.no_grad():
            self.view = view(self.weight)

    def without_grad(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x @ self.view

    def read(self, x: Tensor) -> Tensor:
        return (x @ self.view).sum()

    def given(self, x: Tensor, view: Tensor) -> Tensor:
        return (x @ view).sum() + (x * self.weight).sum()

    def step(self, x: Tensor) -> Tensor:
        loss = (x @ self.view).sum() + self.weight.square().sum()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("method", ["without_grad", "read", "given", "step"])
@pytest.mark.parametrize("name", VIEWS)
def test_they_are_read_in_graphs(device: torch.device, name: str, method: str) -> None:
    ours, eagers = Cache(device, VIEWS[name]), Cache(device, VIEWS[name])
    fast: Any = pygraph.jit(getattr(ours, method))
    for number in range(5):
        x = torch.full((3, 3), float(number), device=device)
        found, expected = (
            fn(x, cache.view) if method == "given" else fn(x)
            for fn, cache in ((fast, ours), (getattr(eagers, method), eagers))
        )
        torch.testing.assert_close(found, expected)
        assert found.requires_grad == expected.requires_grad
        if expected.requires_grad:
            found.backward()
            expected.backward()
    assert (ours.weight.grad is None) == (eagers.weight.grad is None)
    if eagers.weight.grad is not None:
        torch.testing.assert_close(ours.weight.grad, eagers.weight.grad)
    assert ours.view.grad is None
    assert "gradient function" not in str(fast.explain())
    assert fast.cache_info().captures <= 2
