"""Attention whose forward and backward are in different regions, of which each may be a graph or launched."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pygraph
from pygraph.ir.selections import Selection
from pygraph.runtime.prior import LAUNCH
from pygraph.runtime.selecting import RegionSelector

pytestmark = pytest.mark.gpu

KERNELS = {
    "memory-efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "cuDNN": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
}


class Attention(nn.Module):
    """Of queries, keys and values that are one projection."""

    def __init__(self, kernel: SDPBackend, dropout: float) -> None:
        super().__init__()
        self.project, self.kernel, self.dropout = nn.Linear(64, 192), kernel, dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kernel):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)


def step_of(net: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = net(x).float()
        scale = out.detach().abs().mean().cpu().tanh().to(x.device)  # the host computes it
        loss = (out * scale).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


WAYS = {
    "all graphs": (pygraph.devicify, pygraph.indirect, pygraph.graphify),
    "forward launched": None,
    "backward launched": None,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_work_on_the_host_between(monkeypatch: pytest.MonkeyPatch, kernel: str, dropout: float, way: str) -> None:
    is_forward = itertools.cycle([True, False])  # of the regions that were measured, in turn

    original = RegionSelector.select

    def select(selector: RegionSelector, *args: Any) -> Selection:
        found = original(selector, *args)
        is_launched = next(is_forward) == (way == "forward launched")
        return dataclasses.replace(found, chosen=LAUNCH) if is_launched else found

    monkeypatch.setattr(RegionSelector, "select", select)
    backend, dtype = KERNELS[kernel]
    torch.manual_seed(0)
    eager = Attention(backend, dropout).cuda().to(dtype)
    net = copy.deepcopy(eager)
    fast, slow = pygraph.jit(step_of(net), passes=WAYS[way]), step_of(eager)
    for seed in range(6):
        x = torch.randn(2, 32, 64, device="cuda", dtype=dtype)
        torch.manual_seed(seed)
        got = fast(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(got, slow(x))
    torch.testing.assert_close(net.state_dict(), eager.state_dict())
    report = fast.explain().to_dict()
    assert [region["kind"] for region in report["regions"]].count("graph") >= 2, report["regions"]
    assert fast.cache_info().hits >= 3
    if way == "all graphs":
        assert {region["way"] for region in report["regions"] if region["kind"] == "graph"} == {"patch"}
