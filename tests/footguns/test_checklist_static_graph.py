"""NVIDIA's checklist of CUDA Graphs for PyTorch: what a replay would repeat as it was when it was captured."""

# Functions are called on whatever torch gives them.
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint

import pygraph
from tests.footguns.checklist import (
    Function,
    as_eager,
    close,
    counted,
    in_graphs,
    linear,
    ones,
    said,
)

# ---- Decisions by numbers --------------------------------------------------------------------------------------


def test_a_decision_by_a_number_of_the_host(device: torch.device) -> None:
    """The number is compared at every call."""

    def function(number: int, x: torch.Tensor) -> torch.Tensor:
        y = x + 1 if number % 2 == 0 else x - 1
        return y * x

    as_eager(lambda: function, [(number, ones(device, 3)) for number in range(6)])


# ---- Clipping of gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [0.1, 1e6])
def test_a_step_that_clips(device: torch.device, largest: float) -> None:
    """The norm is compared on the device."""

    def make() -> Function:
        model = linear(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), largest)
            optimizer.step()
            return loss.detach()

        return step

    assert in_graphs(as_eager(make, counted(device, 3, 4)))


# ---- Early exits -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_layers_until_a_value_is_small(device: torch.device) -> None:
    def make() -> Function:
        layers = [linear(device) for _ in range(4)]

        def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            for used, layer in enumerate(layers):
                x = layer(x)
                if x.abs().mean() < 0.5:
                    return x, used
            return x, len(layers)

        return function

    fast = as_eager(make, [(ones(device, 3, 4) * scale,) for scale in (0.1, 10.0, 0.1, 10.0, 1.0, 0.1)])
    assert said(fast)


# ---- Code that knows of the capture ----------------------------------------------------------------------------


def test_code_that_asks_whether_it_is_captured(device: torch.device) -> None:
    """A function is traced, not captured, so that it takes eager's branch."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return -x if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() else x * 2

    assert in_graphs(as_eager(lambda: function, counted(device, 3)))


# ---- Inputs at new addresses -----------------------------------------------------------------------------------


def test_new_inputs_are_read_and_nothing_is_copied(device: torch.device) -> None:
    fast, held = pygraph.jit(lambda x: x * 2 + 1), list[torch.Tensor]()
    for number in range(6):
        held.append(torch.full((3,), float(number), device=device))
        assert fast(held[-1]).tolist() == [2 * number + 1] * 3
    assert fast.cache_info().captures == 1
    assert fast.explain().to_dict()["bytes_copied_per_replay"] == 0


# ---- Global tensors --------------------------------------------------------------------------------------------

_mean = torch.zeros(2)


def test_a_global_tensor_that_is_bound_anew(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As running statistics are; the tensor of the last call is garbage by then."""

    def function(x: torch.Tensor) -> torch.Tensor:
        global _mean
        _mean = _mean * 0.9 + x * 0.1
        return x - _mean

    def make() -> Function:
        monkeypatch.setitem(globals(), "_mean", torch.zeros(2, device=device))
        return function

    assert in_graphs(as_eager(make, counted(device, 2, calls=7)))


# ---- Arrays of pointers ----------------------------------------------------------------------------------------


def test_operations_on_lists_of_new_tensors(device: torch.device) -> None:
    """Their kernels take addresses in arrays."""

    def function(xs: list[torch.Tensor], k: float) -> list[torch.Tensor]:
        torch._foreach_mul_(xs, k)
        return torch._foreach_add(xs, 1.0)

    fast = pygraph.jit(function)
    for number in range(6):
        mine, eager = ([ones(device, size) * number for size in (2, 3, 4)] for _ in range(2))
        close(fast(mine, number / 2), function(eager, number / 2))
        close(mine, eager)
    assert fast.cache_info().captures == 1


# ---- Autocast and its cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
def test_weights_that_change_between_calls_under_autocast(device: torch.device, cached: bool) -> None:
    """A cast of theirs is part of every replay, whether autocast is inside or outside."""
    model, twin = linear(device), linear(device)

    def outside(fn: Function, x: torch.Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=cached):
            return fn(x)

    fast = pygraph.jit(model)
    inside = pygraph.jit(lambda x: outside(model, x))
    for (x,) in counted(device, 3, 4):
        wanted = outside(twin, x)
        assert wanted.dtype == torch.bfloat16
        close(outside(fast, x), wanted)
        close(inside(x), wanted)
        with torch.no_grad():
            model.weight.mul_(1.5)
            twin.weight.mul_(1.5)
    assert in_graphs(fast)
    assert in_graphs(inside)


# ---- Numbers of the host ---------------------------------------------------------------------------------------


def test_numbers_that_change(device: torch.device) -> None:
    """They are passed with the replay."""
    for kind in (float, np.float32, torch.tensor):
        fast = as_eager(lambda: lambda x, k: x * k + k, [(ones(device, 3), kind(n / 2)) for n in range(6)])
        assert fast.cache_info().captures == 1
        assert in_graphs(fast)


# ---- Learning rates and counts of steps ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"foreach": False}, {"fused": True}])
def test_a_schedule_and_a_count_of_steps(device: torch.device, options: dict[str, bool]) -> None:
    """Adam divides by powers of its count, and the schedule changes a Python number."""
    runs: list[tuple[nn.Linear, Function, Any]] = []
    for _ in range(2):
        model = linear(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)

        def step(x: torch.Tensor, model: nn.Linear = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()

        runs.append((model, step, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)))
    (model, step, schedule), (twin, eager, its_schedule) = runs
    fast = pygraph.jit(step)
    for (x,) in counted(device, 3, 4, calls=10):
        fast(x)
        eager(x)
        schedule.step()
        its_schedule.step()
    close(dict(model.state_dict()), dict(twin.state_dict()))
    assert in_graphs(fast)
    assert fast.cache_info().captures <= 2


# ---- Generators of one's own -----------------------------------------------------------------------------------


def test_a_generator_of_ones_own(device: torch.device) -> None:
    """Nothing is registered: it draws eager's numbers."""

    def make() -> Function:
        generator = torch.Generator(device=device)
        generator.manual_seed(5)
        return lambda x: x + torch.rand(3, generator=generator, device=device)

    fast = as_eager(make, counted(device, 3))
    assert in_graphs(fast)


# ---- Random states ---------------------------------------------------------------------------------------------


def test_random_states_that_are_read_and_set(device: torch.device) -> None:
    states = torch.cuda if device.type == "cuda" else torch.emu  # type: ignore[attr-defined]

    def function(x: torch.Tensor) -> torch.Tensor:
        state = states.get_rng_state()
        first = torch.rand(3, device=device)
        states.set_rng_state(state)
        return x + first - torch.rand(3, device=device)

    as_eager(lambda: function, counted(device, 3))


def test_a_state_of_another_generator(device: torch.device) -> None:
    def make() -> Function:
        generator = torch.Generator(device=device)
        generator.manual_seed(5)

        def function(x: torch.Tensor) -> torch.Tensor:
            generator.set_state(generator.get_state())
            return x + torch.rand(3, generator=generator, device=device)

        return function

    assert "asks for its state" in said(as_eager(make, counted(device, 3)))


@pytest.mark.gpu
def test_states_that_are_safe_for_graphs() -> None:
    device = torch.device("cuda", 0)

    def make() -> Function:
        generator = torch.Generator(device=device)
        generator.manual_seed(5)

        def function(x: torch.Tensor) -> torch.Tensor:
            generator.graphsafe_set_state(generator.graphsafe_get_state())
            return x + torch.rand(3, generator=generator, device=device)

        return function

    as_eager(make, counted(device, 3))


# ---- Checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("preserved", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_step_with_a_checkpoint(device: torch.device, reentrant: bool, preserved: bool, dropout: float) -> None:
    """With and without the random state preserved, of either kind."""

    def make() -> Function:
        model = linear(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def block(x: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.relu(model(x)), dropout)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            x = x.detach().requires_grad_()
            y = checkpoint.checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=preserved)
            loss = y.sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    assert as_eager(make, counted(device, 3, 4)).cache_info().captures > 0


# ---- torch.compile inside --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_function_inside(device: torch.device) -> None:
    """It is warmed up by its own first call."""
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    fast = as_eager(lambda: lambda x: compiled(x) * 2, counted(device, 3))
    assert "torch.compile has made" in said(fast)


# ---- Shapes ----------------------------------------------------------------------------------------------------


def test_shapes_that_change(device: torch.device) -> None:
    """Each has a graph of its own."""
    fast = as_eager(lambda: lambda x: x.cumsum(0) * 2, [(ones(device, size),) for size in (3, 5, 3, 5, 3, 5)])
    assert fast.cache_info().captures == 2


# ---- Mixtures of experts ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_tokens_are_routed_by_values(device: torch.device) -> None:
    """How many go to an expert is known when they are there."""

    def make() -> Function:
        experts, gate = [linear(device) for _ in range(2)], linear(device)

        def function(x: torch.Tensor) -> torch.Tensor:
            chosen = gate(x).argmax(-1) % 2
            result = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                rows = torch.where(chosen == number)[0]
                result.index_add_(0, rows, expert(x[rows]))
            return result

        return function

    fast = as_eager(make, [(ones(device, 6, 4) * k - 10,) for k in range(5)])
    assert said(fast)
    assert fast.cache_info().captures > 0
