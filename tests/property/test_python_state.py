"""Generated programs over Python's state do under `jit` what they do in eager, and leave nothing of a trace behind."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import pygraph
from tests import extent
from tests.fakes import assert_no_fake_left, fakes_followed
from tests.property.python_state import (
    CODE,
    PLACES,
    SPECIAL,
    World,
    world_of_code,
    world_of_place,
    world_of_special,
    worlds,
)


class Side:
    """One of the two executions of a world."""

    def __init__(self, world: World, device: torch.device, wrap: Any) -> None:
        self.module: types.ModuleType = world.module(device)
        self.device = device
        self.step = wrap(self.module.step)

    def call(self, size: int, number: float) -> Any:
        """The result, or the type of the error."""
        x = torch.arange(size, dtype=torch.float32).to(self.device) / 4
        try:
            with torch.no_grad():
                return self.step(x, number)
        except Exception as error:  # which one, is compared
            return type(error)

    def run(self, statements: str, in_thread: bool) -> None:
        """Change something from outside."""
        code = compile(statements, "<change>", "exec")
        if not in_thread:
            exec(code, self.module.__dict__)
            return
        thread = threading.Thread(target=exec, args=(code, self.module.__dict__))
        thread.start()
        thread.join()

    def observe(self, expressions: tuple[str, ...]) -> list[Any]:
        """What the sites hold."""
        return [eval(expression, self.module.__dict__) for expression in expressions]


def same(got: Any, expected: Any) -> bool:
    """Whether two values are equal; tensors, to the last bit."""
    left, tree = pytree.tree_flatten(got)
    right, expected_tree = pytree.tree_flatten(expected)
    return tree == expected_tree and all(map(_same, left, right))


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor) or isinstance(got, FakeTensor) or got.shape != expected.shape:
            return False
        left, right = got.detach().cpu(), expected.detach().cpu()
        return got.dtype == expected.dtype and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    return type(got) is type(expected) and got == expected


def check(world: World, device: torch.device, wrap: Any) -> None:
    """Do the same to both executions of a world, and compare all that can be seen."""
    eager, mine = Side(world, device, lambda fn: fn), Side(world, device, wrap)
    for event in world.events:
        if event[0] == "call":
            expected, got = eager.call(*event[1:]), mine.call(*event[1:])
            assert same(got, expected), f"{event}: {got} instead of {expected}"
        else:
            for side in (eager, mine):
                side.run(event[1], event[0] == "thread")
        expected, got = eager.observe(world.observed), mine.observe(world.observed)
        assert same(got, expected), f"after {event}: {got} instead of {expected}"
    assert _get_current_dispatch_mode_stack() == []
    mine.step.cache_clear()


def check_clean(world: World, device: torch.device) -> None:
    """The same, and no fake tensor is left."""
    with fakes_followed():
        check(world, device, pygraph.jit)
        assert_no_fake_left()


@pytest.mark.parametrize("name", extent.third(list(PLACES)))
def test_a_value_in_a_place(device: torch.device, name: str) -> None:
    check_clean(world_of_place(name), device)


@pytest.mark.parametrize("name", extent.third(list(CODE)))
def test_code_that_is_replaced(device: torch.device, name: str) -> None:
    check_clean(world_of_code(name), device)


@pytest.mark.parametrize("name", extent.third(list(SPECIAL)))
def test_state_that_calls_advance(device: torch.device, name: str) -> None:
    check_clean(world_of_special(name), device)


@settings(max_examples=extent.examples(15, 150), suppress_health_check=list(HealthCheck))
@given(worlds())
def test_as_eager(device: torch.device, world: World) -> None:
    check_clean(world, device)


@pytest.mark.slow
@settings(max_examples=extent.examples(8, 60), suppress_health_check=list(HealthCheck))
@given(worlds())
def test_as_eager_in_python(device: torch.device, monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setenv("PYGRAPH_NATIVE", "0")
    check(world, device, pygraph.jit)
