"""One workload of the table: a model, its batches, and what made it hard for CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]
"""Keyword arguments of a model: tensors on the device, and whatever its callers pass from the host."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and what it is run on.

    Attributes:
        model: The model, on the CPU in float32, with random weights. The benchmark moves and converts it.
        batch: Makes a batch, another one for each seed, with its tensors on a device, and those of inference in a dtype
            if they hold floating-point numbers.
        loss: The loss of what the model returned for a batch; None for a workload of inference.
    """

    model: nn.Module
    batch: Callable[[int, torch.device, torch.dtype], Batch]
    loss: Callable[[Any, Batch], torch.Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class Workload:
    """A row of the table.

    Attributes:
        name: How the command line calls it, as ``xlnet-i``.
        title: What the paper calls it.
        training: Whether it trains (forward, backward, optimizer), with autocast; else one forward in bfloat16.
        batch_size: The number of samples in a batch.
        source: Where the model comes from: a package and its class, or "written here".
        hard: The construct that stands in the way of CUDA graphs, or what a replay would copy.
        differs: What is not as in the original; empty if nothing is.
        make: Makes the task; a small one, with the same constructs, for tests.
        packages: What has to be installed besides torch and NumPy.
    """

    name: str
    title: str
    training: bool
    batch_size: int
    source: str
    hard: str
    differs: str
    make: Callable[[bool], Task]
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.endswith("-t" if self.training else "-i"):
            raise ValueError(f"the name {self.name!r} must end with -t for training, with -i for inference")
