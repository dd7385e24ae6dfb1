"""Tensors of which a function reads what they are like, and not what is in them: the next call may find others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph


class Model:
    """A tensor and a module to which functions close over."""

    def __init__(self, device: torch.device) -> None:
        self.weight = torch.ones(3, device=device)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)

    def flag(self, x: Tensor) -> Tensor:
        return x * 2 if self.layers[0].weight.requires_grad else x * 3

    def trainable(self, x: Tensor) -> Tensor:
        return x * sum(one.numel() for one in self.layers.parameters() if one.requires_grad)

    def shape(self, x: Tensor) -> Tensor:
        return x * self.weight.shape[0]

    def length(self, x: Tensor) -> Tensor:
        return x * len(self.weight) + self.weight.numel() + self.weight.dim()

    def dtype(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) * (2 if self.weight.is_floating_point() else 3)

    def change(self, number: int) -> None:
        """Change what the tensor and the module's parameters are like."""
        shapes = ((3,), (3,), (4,), (3, 3), (3,))
        dtype = torch.int32 if number % 5 == 4 else torch.float32
        self.weight.data = torch.ones(shapes[number % 5], device=self.weight.device, dtype=dtype)
        weight: Any = self.layers[0].weight
        weight.requires_grad_(number % 4 < 2)


@pytest.mark.parametrize("name", ["flag", "trainable", "shape", "length", "dtype"])
def test_what_tensors_are_like_is_read_at_each_call(device: torch.device, name: str) -> None:
    model = Model(device)
    function: Callable[[Tensor], Tensor] = getattr(model, name)
    fast, x = pygraph.jit(function), torch.ones(2, device=device)
    for number in range(10):
        model.change(number)
        found, expected = fast(x), function(x)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_a_tensor_that_stays_as_it_is_makes_no_new_trace(device: torch.device) -> None:
    model = Model(device)
    fast, x = pygraph.jit(model.trainable), torch.ones(2, device=device)
    for _ in range(6):
        assert torch.equal(fast(x), model.trainable(x))
    assert fast.cache_info().captures == 1
