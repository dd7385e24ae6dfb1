"""Whose code something is: its module's name may be that of a library though a user has written it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph.guards.packages import is_library, is_library_class, is_library_function

pytestmark = pytest.mark.rotates

Tensor = torch.Tensor
State = types.SimpleNamespace
Step = Callable[[Tensor], Tensor]


def wrapper(state: State, wrapped: Any) -> Step:
    @functools.wraps(wrapped)
    def step(x: Tensor) -> Tensor:
        state.n += 1
        return x * state.k

    return step


def wraps_operation(state: State) -> Step:
    step = wrapper(state, F.linear)
    return lambda x: step(x) * 2


def wraps_directly(state: State) -> Step:
    return wrapper(state, math.sqrt)


def wraps_forward(state: State) -> Step:
    return wrapper(state, torch.nn.Linear(2, 2).forward)


def made_dataclass(state: State) -> Step:
    def run(self: Any, x: Tensor) -> Tensor:
        state.n += 1
        return x * state.k * self.scale

    made: Any = dataclasses.make_dataclass("Made", [("scale", float)], namespace={"run": run})
    return made(2.0).run


def new_class(state: State) -> Step:
    def run(self: Any, x: Tensor) -> Tensor:
        state.n += 1
        return x * state.k * self.scale

    made: Any = types.new_class("Made", (), {}, lambda body: body.update(run=run, scale=3.0))
    return made().run


def rate(state: State) -> Step:
    """A method that only a library calls."""

    class Schedule(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float]:  # pyright: ignore[reportIncompatibleMethodOverride]
            state.n += 1
            return [0.1 * state.k]

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    schedule = Schedule(optimizer)

    def step(x: Tensor) -> Tensor:
        optimizer.step()
        schedule.step()
        return x * optimizer.param_groups[0]["lr"]

    return step


def of_convolution(state: State) -> Step:
    class Convolution(torch.nn.Conv1d):
        def _conv_forward(self, *args: Any, **kwargs: Any) -> Tensor:
            state.n += 1
            return super()._conv_forward(*args, **kwargs) * state.k

    with torch.no_grad():
        layer = Convolution(1, 1, 1, bias=False)
        layer.weight.fill_(2.0)
    layer.requires_grad_(False)
    return lambda x: layer.to(x.device)(x[None]) * 1


FORMS = (wraps_operation, wraps_directly, wraps_forward, made_dataclass, new_class, rate, of_convolution)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_code_of_the_user_under_a_name_of_a_library(device: torch.device, form: Callable[[State], Step]) -> None:
    def run(wrap: Callable[[Step], Step]) -> list[tuple[list[float], int]]:
        state = State(n=0, k=2.0)
        call, found = wrap(form(state)), []
        for index in range(8):
            state.k = 2.0 + index // 2
            found.append((call(torch.ones(2, device=device)).flatten().tolist(), state.n))
        return found

    assert run(pygraph.jit) == run(lambda step: step)


def test_a_module_that_has_the_name_of_one_of_the_standard_library(
    device: torch.device, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sndhdr.py"
    file.write_text("SCALE = 2.0\ndef run(x):\n    return x * SCALE\n")
    spec = importlib.util.spec_from_file_location("sndhdr", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sndhdr", module)
    spec.loader.exec_module(module)
    is_library.cache_clear()
    try:
        fast = pygraph.jit(module.run)
        for scale in (2.0, 2.0, 3.0, 3.0):
            module.SCALE = scale
            assert fast(torch.ones(2, device=device)).tolist() == [scale, scale]
    finally:
        is_library.cache_clear()


def test_what_is_of_a_library() -> None:
    assert is_library_function(F.linear if isinstance(F.linear, types.FunctionType) else F.relu)
    assert is_library_function(functools.wraps)
    assert not is_library_function(wrapper(State(), F.relu))  # pyright: ignore[reportArgumentType]
    assert is_library_class(types.SimpleNamespace)
    assert not is_library_class(types.new_class("Made"))
    assert is_library(torch.nn.Linear.__dict__.get("__module__"))
    assert is_library(types.GetSetDescriptorType)  # of a class that is no code of Python's
