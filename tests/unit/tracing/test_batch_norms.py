"""Batch normalization with a momentum that changes: it is live, and the running statistics are eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph

MOMENTA = [0.1 * 0.9**number for number in range(12)]


def _assert_same_statistics(net: nn.Module, other: nn.Module) -> None:
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], msg=lambda text, name=name: f"{name}: {text}")


def test_a_momentum_that_decays_is_one_graph(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).to(device)
    other = copy.deepcopy(net)

    def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        loss = torch.zeros((), device=device)
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    fast = pygraph.jit(epoch)
    optimizers = [torch.optim.SGD(one.parameters(), 0.05) for one in (net, other)]
    for momentum in MOMENTA:
        for model in (net, other):
            model[1].momentum = momentum  # type: ignore[union-attr]
        batches = [(torch.randn(8, 4, device=device), torch.randint(0, 2, (8,), device=device)) for _ in range(2)]
        torch.testing.assert_close(fast(net, optimizers[0], batches), epoch(other, optimizers[1], batches))
        _assert_same_statistics(net, other)
    assert fast.cache_info().captures <= 4


@pytest.mark.parametrize("function", [F.batch_norm, torch.batch_norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_the_statistics_are_those_of_eager(
    device: torch.device, function: Any, dtype: torch.dtype, training: bool
) -> None:
    def normalized(mean: Tensor, var: Tensor, x: Tensor, momentum: float) -> Tensor:
        if function is F.batch_norm:
            return F.batch_norm(x, mean, var, training=training, momentum=momentum)
        in_c: Any = vars(torch)["batch_norm"]
        return in_c(x, None, None, mean, var, training, momentum, 1e-5, True)

    fast = pygraph.jit(normalized)
    ours, eagers = ([torch.zeros(3, device=device), torch.ones(3, device=device)] for _ in range(2))
    for momentum in MOMENTA:
        x = torch.randn(4, 3, 2, device=device).to(dtype)
        torch.testing.assert_close(fast(ours[0], ours[1], x, momentum), normalized(eagers[0], eagers[1], x, momentum))
        torch.testing.assert_close(ours, eagers)
    assert fast.cache_info().captures <= 2


def test_statistics_that_are_not_finite_are_mixed_as_in_eager(device: torch.device) -> None:
    fast = pygraph.jit(lambda net, x: net(x))
    net = nn.BatchNorm1d(2).to(device)
    other = copy.deepcopy(net)
    for number, momentum in enumerate((0.5, 0.25, 1.0, 0.0)):
        net.momentum = other.momentum = momentum
        x = torch.randn(4, 2, device=device)
        if number == 1:
            x[0, 0] = torch.inf
        with torch.no_grad():
            torch.testing.assert_close(fast(net, x), other(x), equal_nan=True)
        for ours, eagers in zip(net.buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(ours, eagers, equal_nan=True)
