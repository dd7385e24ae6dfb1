"""Tiny workloads for tests of ``python -m pygraph bench``, and some that fail."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

from benchmarks.table.workload import Batch, Task, Workload


class Scaled(nn.Module):
    """A layer with a scalar of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
        return {"scores": torch.tanh(self.layer(x)) * scale}


def batch(seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(2, 8, generator=generator).to(device, dtype), "scale": 0.5}


def inference(small: bool) -> Task:
    return Task(Scaled(), batch)


def training(small: bool) -> Task:
    return Task(Scaled(), batch, lambda found, batch: found["scores"].float().square().mean())


def dying(small: bool) -> Task:
    print("about to die", file=sys.stderr, flush=True)
    os._exit(7)


def hanging(small: bool) -> Task:
    time.sleep(600)
    raise AssertionError


def failing(small: bool) -> Task:
    raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")


_MAKERS = {"tiny-i": inference, "tiny-t": training, "dying-i": dying, "hanging-i": hanging, "failing-i": failing}

WORKLOADS = {
    name: Workload(name, name.title(), name.endswith("-t"), 2, "written here", "a scalar", "", make)
    for name, make in _MAKERS.items()
}
