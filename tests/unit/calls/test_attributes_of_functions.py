"""Attributes of a transformed function: they are the function's own, which may read and set them by its name."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph


def plain(fn: Any) -> Any:
    """A decorator that changes nothing."""
    return fn


def counting(decorate: Callable[[Any], Any], x: Tensor) -> list[Any]:
    @decorate
    def step(x: Tensor) -> Tensor:
        step.calls += 1
        step.last = x * 2
        step.log[0] += 2
        if not hasattr(step, "cache"):
            step.cache = x + 1
        return x * step.calls + step.cache

    step.calls, step.log = 0, [0]
    found: list[Any] = []
    for k in range(6):
        found += [step(x + k), step.last, step.calls, list(step.log)]
        if k == 3:
            del step.cache
            step.calls = 40
    return found


def read(decorate: Callable[[Any], Any], x: Tensor) -> list[Any]:
    @decorate
    def step(x: Tensor) -> Tensor:
        step.h.add_(1)
        return x * step.scale + step.config["k"] + step.h

    step.scale, step.config, step.h = 1.0, {"k": 1}, torch.zeros_like(x)
    found: list[Any] = []
    for k in range(6):
        step.scale, step.config["k"] = k * 0.5, k // 2
        vars(step)["other"] = k
        found += [step(x), step.h.clone(), step.other]
    return found


def of_method(decorate: Callable[[Any], Any], x: Tensor) -> list[Any]:
    class Trainer:
        @decorate
        def step(self, x: Tensor) -> Tensor:
            Trainer.step.n += 1
            return x * Trainer.step.n

    Trainer.step.n = 0
    return [found for _ in range(6) for found in (Trainer().step(x), Trainer.step.n)]


def of_another(decorate: Callable[[Any], Any], x: Tensor) -> list[Any]:
    @decorate
    def inner(x: Tensor) -> Tensor:
        return x * inner.k

    @decorate
    def outer(x: Tensor) -> Tensor:
        inner.k += 1
        return inner(x) + 1

    inner.k = 0
    return [found for _ in range(6) for found in (outer(x), inner.k)]


def wrapping(decorate: Callable[[Any], Any], x: Tensor) -> list[Any]:
    inner = decorate(lambda x: x * 2)
    inner.tag = "a"

    @functools.wraps(inner)
    def wrapper(x: Tensor) -> Tensor:
        wrapper.n += 1
        return inner(x) * wrapper.n

    wrapper.n = 0
    fast = decorate(wrapper)
    return [found for _ in range(6) for found in (fast(x), fast.n, wrapper.n, wrapper.tag, sorted(vars(wrapper)))]


class Scaling:
    """An object that is called."""

    def __init__(self) -> None:
        self.k = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.k


def of_object(decorate: Callable[[Any], Any], x: Tensor) -> list[Any]:
    scaling = Scaling()
    fast = decorate(scaling)
    found: list[Any] = []
    for k in range(6):
        fast.k = k / 2
        found += [fast(x), scaling.k]
    return found


@pytest.mark.parametrize("make", [counting, read, of_method, of_another, wrapping, of_object])
def test_they_are_those_of_the_function(device: torch.device, make: Any) -> None:
    x = torch.linspace(-1, 1, 5, device=device)
    found, expected = make(pygraph.jit, x), make(plain, x)
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == other


def doubled(x: Tensor) -> Tensor:
    """Double."""
    return x * 2


def test_what_is_of_the_transformed_function_itself(device: torch.device) -> None:
    fast = pygraph.jit(doubled)
    assert (fast.__name__, fast.__doc__, fast.__module__, fast.__wrapped__) == ("doubled", "Double.", __name__, doubled)
    with pytest.raises(AttributeError):
        _ = fast.missing
    with pytest.raises(AttributeError):
        del fast.missing
    method = pygraph.jit(Scaling().__call__)
    method.name = "a"  # a method takes none
    assert method.name == "a"
    del method.name
    assert not hasattr(method, "name")
    for copied in (copy.copy(fast), copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(copied(torch.ones(2, device=device)), torch.full((2,), 2.0, device=device))
