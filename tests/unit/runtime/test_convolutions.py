"""Convolutions of inputs with channels last: what is chosen for their layout in a trace fits what the device gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pygraph

BEHIND: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": lambda y: F.group_norm(y, 2),
    "flat": lambda y: y.flatten(1),
    "reshaped": lambda y: y.reshape(2, -1),
    "nothing": lambda y: y,
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("of_weight", [False, True])
def test_results_and_gradients(device: torch.device, behind: str, size: int, of_weight: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 5, 5).to(device), torch.randn(4, 4, size, size).to(device)
    if of_weight:
        weight = weight.contiguous(memory_format=torch.channels_last)
    else:
        x = x.contiguous(memory_format=torch.channels_last)
    weight.requires_grad_()

    def convolved(x: Tensor) -> Tensor:
        return BEHIND[behind](F.conv2d(x, weight))

    fast = pygraph.jit(convolved)
    for _ in range(3):
        results = [convolved(x), fast(x)]
        assert results[0].stride() == results[1].stride()
        torch.testing.assert_close(results[1], results[0])
        gradients = [torch.autograd.grad(result.pow(3).sum(), weight)[0] for result in results]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
