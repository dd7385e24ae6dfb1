"""Versions of tensors: a trace only records updates, so autograd finds tensors updated as often as before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from pygraph.errors import TraceError
from tests.steps import assert_same


def clamped(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.clamp_(-1, 1)


def scaled_by_an_alias(weight: nn.Parameter) -> None:
    weight.detach()[1:].mul_(0.5)


def replaced(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0] = 2.0
        weight.copy_(weight * 2)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("update", [clamped, scaled_by_an_alias, replaced])
def test_a_trace_leaves_versions_alone(device: torch.device, update: Callable[[Any], None], ends: bool) -> None:
    weight = nn.Parameter(torch.ones(4, device=device))

    def fn(x: Tensor) -> Tensor:
        update(weight)
        if ends:
            time.time()
        return x * 2

    loss = (weight * weight).sum()
    if ends:
        with pytest.raises(TraceError, match="time"):
            pygraph.trace(fn)(torch.ones(4, device=device))
    else:
        pygraph.trace(fn)(torch.ones(4, device=device))
    assert weight._version == 0  # pyright: ignore[reportPrivateUsage]
    loss.backward()
    assert weight.grad is not None


def test_weights_that_are_clipped_in_a_loop_with_times(device: torch.device) -> None:
    """As a Wasserstein critic's are, in an epoch with meters of time; a part behind the forward ended in vain."""

    def make() -> tuple[nn.Module, Callable[[Any], list[float]]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)

        def epoch(batches: Any) -> list[float]:
            losses: list[float] = []
            end = time.time()
            for x, y in batches:
                waited = time.time() - end
                loss = F.cross_entropy(net(x), y)
                losses.append(loss.item() if waited >= 0 else 0.0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for p in net.parameters():
                        p.clamp_(-0.2, 0.2)
                end = time.time()
            return losses

        return net, epoch

    (theirs, eager), (mine, epoch) = make(), make()
    fast = pygraph.jit(epoch)
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        batches = [
            (
                torch.randn(4, 6, generator=generator).to(device),
                torch.randint(0, 3, (4,), generator=generator).to(device),
            )
            for _ in range(2)
        ]
        assert_same(fast(batches), eager(batches), device)
    assert_same(mine.state_dict(), theirs.state_dict(), device)
