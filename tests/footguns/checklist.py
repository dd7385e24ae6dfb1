"""What the tests of NVIDIA's checklist share: arguments, and comparisons of jitted functions with eager."""

# Functions are called on whatever torch gives them.
from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import pygraph

Function = Callable[..., Any]
"""A function, or a module."""


def ones(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device=device).view(shape)


def linear(device: torch.device) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4).to(device)


def said(fn: Any) -> str:
    """What the report says of what does not run in a graph."""
    report = fn.explain().to_dict()
    return "; ".join([*map(str, report["in_python"]), *(one["reason"] for one in report["fallbacks"])])


def in_graphs(fn: Any) -> bool:
    """Whether every kernel of the latest kind of call is in a graph, and nothing runs as Python."""
    report = fn.explain().to_dict()
    return report["kernels_in_graphs"] == report["kernels"] > 0 and not report["in_python"]


def close(mine: object, eager: object) -> None:
    torch.testing.assert_close(mine, eager, rtol=1e-6, atol=1e-6, equal_nan=True)


def as_eager(make: Callable[[], Function], calls: Iterable[tuple[Any, ...]], **options: Any) -> Any:
    """Compare every call of a function that is made twice, with one seed; returns the jitted one."""
    calls = list(calls)
    torch.manual_seed(7)
    eager = make()
    wanted = [copy.deepcopy(eager(*args)) for args in calls]
    torch.manual_seed(7)
    fast = pygraph.jit(make(), **options)
    close([copy.deepcopy(fast(*args)) for args in calls], wanted)
    return fast


def counted(device: torch.device, *shape: int, calls: int = 5) -> list[tuple[Any, ...]]:
    """The arguments of several calls: tensors of one shape with other values."""
    return [(ones(device, *shape) * number / 4,) for number in range(1, calls + 1)]
