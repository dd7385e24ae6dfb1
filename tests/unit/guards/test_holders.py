"""Functions that a function reaches by an object of a library: what they read and change is known as its own is."""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import types
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Normal, TransformedDistribution, constraints
from torch.distributions.transforms import Transform

import pygraph

pytestmark = pytest.mark.rotates

Tensor = torch.Tensor
State = types.SimpleNamespace
Step = Callable[[Tensor], Tensor]


def decorated(state: State) -> Step:
    """By a context manager that is made of a generator."""

    @contextlib.contextmanager
    def counted() -> Generator[None, None, None]:
        state.n += 1
        yield
        state.n += 100

    @torch.no_grad()
    @counted()
    def step(x: Tensor) -> Tensor:
        return x * state.k

    return step


def called(state: State) -> Step:
    """A helper that is decorated so, with the state as the manager's argument."""

    @contextlib.contextmanager
    def counted(of: State) -> Generator[None, None, None]:
        of.n += 1
        yield

    @counted(state)
    def helper(x: Tensor) -> Tensor:
        return x * 2

    return lambda x: helper(x) * 3


def null(state: State) -> Step:
    """What a null context gives."""

    def scaled(x: Tensor) -> Tensor:
        state.n += 1
        return x * state.k

    given = contextlib.nullcontext(scaled)

    def step(x: Tensor) -> Tensor:
        with given as fn:
            return fn(x)

    return step


def compared(state: State) -> Step:
    """A function that compares, for sorting."""

    def compare(one: int, other: int) -> int:
        return (one - other) * (1 if state.k < 3 else -1)

    key = functools.cmp_to_key(compare)
    return lambda x: x * min([3, 1, 2], key=key)


def saved(state: State) -> Step:
    """Hooks of saved tensors."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * state.k, lambda tensor: tensor)

    def step(x: Tensor) -> Tensor:
        w = torch.ones_like(x, requires_grad=True)
        with hooks:
            y = (w * w * x).sum()
        return torch.autograd.grad(y, w)[0]

    return step


def of_distribution(state: State) -> Step:
    """A method that takes the place of a library's."""

    class Scaled(Transform):
        domain = codomain = constraints.real
        bijective = True

        def _inverse(self, y: Tensor) -> Tensor:
            return y / state.k

        def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
            state.n += 1
            return torch.zeros_like(x) + state.k

    def step(x: Tensor) -> Tensor:
        base: Any = Normal(torch.zeros_like(x), 1.0, validate_args=False)
        return TransformedDistribution(base, [transform], validate_args=False).log_prob(x)

    transform = Scaled()
    return step


def static(state: State) -> Step:
    """A static method out of its class."""

    class Holder:
        @staticmethod
        def scaled(x: Tensor) -> Tensor:
            state.n += 1
            return x * state.k

    method: Any = vars(Holder)["scaled"]
    return lambda x: method(x)


HOLDERS = (decorated, called, null, compared, saved, of_distribution, static)


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__)
def test_functions_of_the_user_in_objects_of_libraries(device: torch.device, holder: Callable[[State], Step]) -> None:
    def run(wrap: Callable[[Step], Step]) -> list[tuple[list[float], int]]:
        state = State(n=0, k=2.0)
        call, found = wrap(holder(state)), []
        for index in range(8):
            state.k = 2.0 + index // 2
            found.append((call(torch.full((2,), index + 1.0, device=device)).tolist(), state.n))
        return found

    assert run(pygraph.jit) == run(lambda step: step)


def appended(held: list[float]) -> Callable[[Tensor], Tensor]:
    append = held.append
    return lambda x: (append(1.0), x * 2)[1]


def appended_by_default(held: list[float]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor, append: Callable[[float], None] = held.append) -> Tensor:
        append(1.0)
        return x * 2

    return step


def appended_partially(held: list[float]) -> Callable[[Tensor], Tensor]:
    append = functools.partial(held.append, 2.0)
    return lambda x: (append(), x * 2)[1]


def read(held: list[float]) -> Callable[[Tensor], Tensor]:
    item = held.__getitem__
    return lambda x: x * item(0)


@pytest.mark.parametrize("bound", [appended, appended_by_default, appended_partially, read], ids=lambda b: b.__name__)
def test_methods_that_are_written_in_c(device: torch.device, bound: Callable[[list[float]], Step]) -> None:
    def run(wrap: Callable[[Step], Step]) -> list[tuple[list[float], list[float]]]:
        held = [1.0]
        call, found = wrap(bound(held)), []
        for index in range(8):
            held[0] = 1.0 + index // 3
            found.append((call(torch.ones(2, device=device)).tolist(), list(held)))
        return found

    assert run(pygraph.jit) == run(lambda step: step)


def test_methods_of_other_containers(device: torch.device) -> None:
    def run(wrap: Callable[[Step], Step]) -> list[tuple[list[float], int, list[int]]]:
        config, window = {"k": 2.0, **{str(i): float(i) for i in range(20)}}, collections.deque[int](maxlen=3)
        numbers = array.array("d", [1.0])
        get, pop, push, number = config.get, config.popitem, window.append, numbers.__getitem__

        def step(x: Tensor) -> Tensor:
            push(len(window))
            return x * (get("k") or 0.0) * pop()[1] * number(0)

        call, found = wrap(step), []
        for index in range(8):
            config["k"] = 2.0 + index // 3
            numbers[0] = 1.0 + index // 4
            found.append((call(torch.ones(2, device=device)).tolist(), len(config), list(window)))
        return found

    assert run(pygraph.jit) == run(lambda step: step)


def test_random_functions_of_numpy_by_names_of_their_own(device: torch.device) -> None:
    generator = np.random.default_rng(3)
    normal, choice = generator.normal, np.random.choice
    partial = functools.partial(np.random.uniform, 0.0, 1.0)
    steps: list[Step] = [
        lambda x: x * float(normal()),
        lambda x: x * int(choice(5)),
        lambda x: x * partial(),
        lambda x: x * 2 if x.shape[0] == 2 else x * float(normal()),
    ]
    for step in steps:

        def run(call: Step) -> list[list[float]]:
            generator.bit_generator.state = np.random.default_rng(3).bit_generator.state
            np.random.seed(0)
            return [call(torch.ones(2, device=device)).tolist() for _ in range(6)]

        assert run(pygraph.jit(step)) == run(step)
