"""The processes in which Inductor compiles: when they are started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.calls import compilation, pipeline


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order: a start of workers, or a trace."""
    events: list[str] = []
    trace = pipeline.trace_call

    def traced(*args: Any, **kwargs: Any) -> Any:
        events.append("trace")
        return trace(*args, **kwargs)

    monkeypatch.setattr(pipeline, "trace_call", traced)
    for module in (compilation, pipeline):
        monkeypatch.setattr(module, "start_workers_early", lambda: events.append("start"))
    return events


def test_they_are_started_before_a_trace(started: list[str], device: torch.device) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    x = torch.ones(3).to(device)
    pygraph.jit(f)(x)
    assert started == ["trace"]
    started.clear()
    fast = pygraph.jit(f, fuse=True)
    fast(x)
    assert started == ["start", "trace"]
    fast(x)
    assert started == ["start", "trace"]


def test_they_are_started_before_the_first_step_of_an_optimizer(started: list[str], device: torch.device) -> None:
    model = nn.Linear(3, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    fast: Callable[..., Any] = pygraph.jit(step, fuse=True)
    fast(torch.ones(2, 3).to(device))
    assert started == ["start"]
    fast(torch.ones(2, 3).to(device))
    assert started[:3] == ["start", "start", "trace"]
