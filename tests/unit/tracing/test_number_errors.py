"""An operation on numbers of the host that raises an error: the function, or its caller, may catch it."""

from __future__ import annotations

import math
import types
from collections.abc import Callable

import pytest
import torch

import pygraph

pytestmark = pytest.mark.rotates

Tensor = torch.Tensor
Step = Callable[[Tensor], Tensor]
State = types.SimpleNamespace


def reciprocal(state: State) -> float:
    try:
        return 1.0 / state.t
    except ZeroDivisionError:
        return 9.0


def rest(state: State) -> int:
    try:
        return 7 % state.t
    except ZeroDivisionError:
        return 9


def shifted(state: State) -> int:
    try:
        return 1 << (state.t + 1)
    except ValueError:
        return -1


def power(state: State) -> float:
    return 2 ** (state.t % 5 - 2)


def root(state: State) -> float:
    try:
        return math.sqrt(state.t)
    except ValueError:
        return -1.0


def exponential(state: State) -> float:
    try:
        return math.exp(state.t * 300.0)
    except OverflowError:
        return 5.0


def integer(state: State) -> int:
    try:
        return int(math.inf if state.t % 4 == 3 else state.t * 0.5) + int(float("nan") if state.t == 4 else 1.0)
    except (OverflowError, ValueError):
        return 7


def number_of_negative(state: State) -> int:
    try:
        return int(1.0 / (state.t * 0.0 + (state.t > 0)) * 3)
    except ZeroDivisionError:
        return 4


FORMS = (reciprocal, rest, shifted, power, root, exponential, integer, number_of_negative)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("first", [-7, -4, 2])
def test_an_error_that_the_function_catches(device: torch.device, form: Callable[[State], float], first: int) -> None:
    def run(wrap: Callable[[Step], Step]) -> list[tuple[float, int]]:
        state = State(t=first)

        def step(x: Tensor) -> Tensor:
            state.t += 1
            return x * form(state)

        call = wrap(step)
        return [(call(torch.ones(1, device=device)).item(), state.t) for _ in range(12)]

    assert run(pygraph.jit) == run(lambda step: step)


def test_an_error_that_the_caller_catches_leaves_what_came_before(device: torch.device) -> None:
    def run(wrap: Callable[[Step], Step]) -> list[tuple[float | str, int, int]]:
        state, found = State(t=-5, last=0), []

        def step(x: Tensor) -> Tensor:
            state.t += 1
            state.last = state.t
            return x * (1.0 / state.t)

        call = wrap(step)
        for _ in range(10):
            try:
                result = call(torch.ones(1, device=device)).item()
            except ZeroDivisionError as error:
                result = str(error)
            found.append((result, state.t, state.last))
        return found

    assert run(pygraph.jit) == run(lambda step: step)


def test_what_many_divisions_rely_on_is_one_decision(device: torch.device) -> None:
    """One for each of twenty would be more than calls can be asked."""
    counts = [State(t=index) for index in range(1, 21)]
    traced = 0

    def step(x: Tensor) -> Tensor:
        nonlocal traced
        traced += type(x) is not Tensor
        for count in counts:
            count.t += 1
            x = x + 1.0 / count.t
        return x

    fast, x = pygraph.jit(step), torch.zeros(2, device=device)
    for call in range(1, 13):
        expected = sum(1.0 / (index + call) for index in range(1, 21))
        torch.testing.assert_close(fast(x), torch.full_like(x, expected))
        if call == 6:
            before = traced
    assert traced == before
