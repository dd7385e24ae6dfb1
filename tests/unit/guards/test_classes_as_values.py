"""Classes that code finds under no name of their own, methods for texts and copies, and names of attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph

scale = 1.0
made = 0
mean: Any = None
step: Any = None


class Scaled:
    """Reads a variable where an object is made, and changes another one."""

    def __init__(self, x: Tensor) -> None:
        global made
        made += 1
        self.x = x / scale


class Unit:
    def __str__(self) -> str:
        return str(scale)

    def __deepcopy__(self, memo: Any) -> Any:
        return scale


class Maker:
    kind = Scaled

    def __init__(self) -> None:
        self.own = Scaled

    def by_class(self, x: Tensor) -> Tensor:
        return self.kind(x).x

    def by_object(self, x: Tensor) -> Tensor:
        return self.own(x).x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = Scaled

    def forward(self, x: Tensor) -> Tensor:
        return self.made(x).x


REGISTRY = {"scaled": Scaled}
NAMES = SimpleNamespace(kind=Scaled)
UNIT = Unit()


def in_closure() -> Callable[[Tensor], Tensor]:
    Renamed = Scaled
    return lambda x: Renamed(x).x


FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "a dict": lambda: lambda x: REGISTRY["scaled"](x).x,
    "a list": lambda: lambda x: next(one(x) for one in (Scaled,)).x,
    "a namespace": lambda: lambda x: NAMES.kind(x).x,
    "an attribute of a class": lambda: Maker().by_class,
    "an attribute": lambda: Maker().by_object,
    "an attribute of a module": Head,
    "a closure": in_closure,
    "a default": lambda: lambda x, kind=Scaled: kind(x).x,
    "a text": lambda: lambda x: x / float(str(UNIT)),
    "part of a text": lambda: lambda x: x / float(f"{UNIT}"),
    "a copy": lambda: lambda x: x / copy.deepcopy(UNIT),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_they_read_and_change(
    device: torch.device, native: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Any] = []
    for transform in (lambda fn: fn, pygraph.jit):
        monkeypatch.setitem(globals(), "scale", 1.0)
        monkeypatch.setitem(globals(), "made", 0)
        call = transform(FUNCTIONS[name]())
        found: list[Any] = []
        for number in range(6):
            if number == 3:
                monkeypatch.setitem(globals(), "scale", 2.0)
            found.append((call(torch.ones(2, device=device)).tolist(), made))
        results.append(found)
    assert results[0] == results[1]


def test_a_class_as_an_argument(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = pygraph.jit(lambda x, kind: kind(x).x)
    for value in (1.0, 1.0, 2.0, 2.0):
        monkeypatch.setitem(globals(), "scale", value)
        assert fast(torch.ones(2, device=device), Scaled).tolist() == [1 / value] * 2


def test_a_variable_is_not_meant_by_an_attribute_of_its_name(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a script: ``mean = f(x)``, and ``for step in range(10)``, where the function says ``x.mean()``."""
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (weight * x).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = pygraph.jit(train, strict=True)
    for number in range(12):
        monkeypatch.setitem(globals(), "step", number)
        monkeypatch.setitem(globals(), "mean", fast(torch.ones(3, device=device)))
    assert fast.cache_info().captures <= 2
    assert fast.cache_info().hits >= 9
