"""Calls under profilers, of torch's and of Python's, are the graphs that they are without."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

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


def test_calls_are_ranges_of_torchs_profiler(device: torch.device) -> None:
    """With the function's name, in C++ as in Python; without a profiler they make none."""
    function = pygraph.jit(loss)
    in_parts = pygraph.jit(cut)
    x = torch.tensor([0.5, 1.0], device=device)
    for _ in range(4):
        function(x)
        in_parts(x)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(2):
            with record_function("mine"):
                function(x)
        in_parts(x)
        function.engine.call((x,), {})  # by the path in Python
    ranges = [event for event in found.events() if event.name.startswith("pygraph")]
    assert [event.name for event in ranges] == ["pygraph: loss", "pygraph: loss", "pygraph: cut", "pygraph: loss"]
    outer = [None if event.cpu_parent is None else event.cpu_parent.name for event in ranges]
    assert outer == ["mine", "mine", None, None]
    assert all(event.is_user_annotation for event in ranges)
    assert function.explain().to_dict()["fallbacks"] == []


def cut(x: torch.Tensor) -> torch.Tensor:
    return x.sin()[x.nonzero()[:, 0]].cos()


def test_ranges_of_a_call_that_raises(device: torch.device) -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.sin()[: int(index.item())].narrow(0, 0, 1)

    fast = pygraph.jit(function)
    x = torch.ones(2, device=device)
    for _ in range(3):
        fast(x, torch.ones(1, dtype=torch.int64, device=device))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        with pytest.raises(RuntimeError):
            fast(x, torch.zeros(1, dtype=torch.int64, device=device))
        torch.ones(2).cos()
    (outside,) = [event for event in found.events() if event.name == "aten::cos"]
    assert outside.cpu_parent is None


def test_ranges_of_a_forward_and_a_backward(device: torch.device) -> None:
    function = pygraph.jit(loss)
    x = torch.tensor([0.5, 1.0], device=device, requires_grad=True)
    for _ in range(4):
        function(x).backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function(x).backward()
    names = [event.name for event in found.events() if event.name.startswith("pygraph")]
    assert names == ["pygraph: loss", "pygraph: backward(loss)"]
