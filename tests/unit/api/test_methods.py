"""Decorators above ``@staticmethod`` and ``@classmethod``, as below them."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch

import pygraph
from pygraph.calls.transformed import Transformed
from pygraph.errors import ArgumentError


class Model:
    factor = 3.0

    @pygraph.jit
    @staticmethod
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @pygraph.jit(static_argnames="k")
    @staticmethod
    def scale(x: torch.Tensor, *, k: int = 2) -> torch.Tensor:
        return x * k

    @pygraph.jit
    @classmethod
    def times(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor

    @pygraph.graphify(max_graphs=3)
    @pygraph.indirect
    @staticmethod
    def stacked(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    @staticmethod
    @pygraph.jit
    def below(x: torch.Tensor) -> torch.Tensor:
        return x + 2


class Derived(Model):
    factor = 5.0


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(3.0, device=device)


def test_from_the_class_and_from_an_object(x: torch.Tensor) -> None:
    owner: Any
    for owner in (Model, Model(), Derived, Derived()):
        assert torch.equal(owner.add(x), x + 1)
        assert torch.equal(owner.scale(x, k=3), x * 3)
        assert torch.equal(owner.times(x), x * owner.factor)
        assert torch.equal(owner.stacked(x), x - 1)
        assert torch.equal(owner.below(x), x + 2)


def test_they_are_transformed(x: torch.Tensor) -> None:
    owner: Any = Model
    assert isinstance(owner.add, Transformed)
    assert repr(owner.stacked) == "<pygraph graphify(indirect(stacked))>"
    assert owner.stacked.options.max_graphs == 3
    before = owner.add.cache_info().hits
    owner.add(x)
    Model().add(x)
    assert owner.add.cache_info().hits > before
    assert "times" in str(owner.times.explain())
    assert pickle.loads(pickle.dumps(owner.add)) is owner.add


@pytest.mark.parametrize("kind", [property, functools.cached_property], ids=["property", "cached_property"])
def test_properties_say_what_to_do(kind: Any) -> None:
    told = rf"jit\({kind.__name__}\): it is a {kind.__name__}; .*Put @jit below @{kind.__name__}"
    with pytest.raises(ArgumentError, match=told):
        pygraph.jit(kind(lambda self: 1))
