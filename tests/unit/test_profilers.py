"""Calls under profilers, of torch's and of Python's, are the graphs that they are without."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import pygraph

pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so of any profile


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sin().sum()


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shapes": {"record_shapes": True},
    "all": {"record_shapes": True, "with_stack": True, "profile_memory": True, "with_modules": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("differentiated", [False, True])
def test_a_first_call_under_torchs_profiler(device: torch.device, kind: str, differentiated: bool) -> None:
    function = pygraph.jit(loss)
    x = torch.tensor([0.5, 1.0], device=device, requires_grad=differentiated)
    with profile(activities=[ProfilerActivity.CPU], **KINDS[kind]):
        for _ in range(3):
            out = function(x)
            if differentiated:
                (found,) = torch.autograd.grad(out, x)
                assert torch.allclose(found, 2 * (x * 2 + 1).cos())
            assert torch.allclose(out, loss(x))
    captures = function.cache_info().captures
    assert captures > 0
    function(x)
    assert function.cache_info().captures == captures
    assert function.explain().to_dict()["fallbacks"] == []


def test_torchs_profiler_sees_no_trace(device: torch.device) -> None:
    """What is done on fakes is not what a profile is made for."""
    x = torch.ones(2, device=device)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        pygraph.trace(loss)(x)
        torch.ones(3)  # it goes on
    names = [event.name for event in found.events()]
    assert "aten::ones" in names
    assert "aten::sin" not in names


@pytest.mark.parametrize("steps", [loss, lambda x: torch.func.grad(loss)(x)])
def test_a_first_call_under_pythons_profiler(device: torch.device, steps: Callable[[Any], Any]) -> None:
    function = pygraph.jit(steps)
    x = torch.ones(2, device=device)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        for _ in range(3):
            assert torch.allclose(function(x), steps(x))
    finally:
        profiler.disable()
    assert function.explain().to_dict()["fallbacks"] == []
