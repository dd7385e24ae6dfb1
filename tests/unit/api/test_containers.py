"""A transformed container of modules has length, items and iteration, as the container has."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.api.module import TransformedModule


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.ReLU()])

    def __len__(self) -> int:
        return 7

    def __contains__(self, item: object) -> bool:
        return item == "layers"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def pair(device: torch.device) -> tuple[nn.Sequential, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).to(device)
    return model, pygraph.jit(model)


def test_length_items_and_iteration(pair: tuple[nn.Sequential, Any]) -> None:
    model, fast = pair
    assert isinstance(fast, TransformedModule)
    assert type(fast).__name__ == "TransformedModule"
    assert len(fast) == 3
    assert fast[0] is model[0]
    assert [one is other for one, other in zip(fast, model, strict=True)] == [True] * 3
    assert isinstance(fast[1:], nn.Sequential)
    assert model[1] in fast
    assert nn.ReLU() not in fast
    assert fast
    assert not pygraph.jit(nn.Sequential())


def test_changes_of_items_are_seen(pair: tuple[nn.Sequential, Any], device: torch.device) -> None:
    model, fast = pair
    x = torch.randn(4, 3, device=device)
    torch.testing.assert_close(fast(x), model(x))
    fast[1] = nn.Tanh()
    assert isinstance(model[1], nn.Tanh)
    torch.testing.assert_close(fast(x), model(x))
    del fast[2]
    assert len(model) == 2
    torch.testing.assert_close(fast(x), model(x))
    with pytest.raises(IndexError):
        fast[2]


def test_other_containers(device: torch.device) -> None:
    x = torch.randn(4, 3, device=device)
    fast: Any = pygraph.jit(Layers().to(device))
    assert (len(fast), "layers" in fast, "other" in fast) == (7, True, False)
    for use in (lambda: fast[0], lambda: iter(fast)):
        with pytest.raises(TypeError):
            use()
    torch.testing.assert_close(fast(x), fast.layers[1](fast.layers[0](x)))
    named: Any = pygraph.graphify(nn.ModuleDict({"a": nn.ReLU()}))
    assert (list(named), "a" in named, len(named)) == (["a"], True, 1)
    assert isinstance(named["a"], nn.ReLU)


def test_a_module_that_is_no_container() -> None:
    fast: Any = pygraph.jit(nn.Linear(3, 2))
    assert type(fast) is TransformedModule
    assert fast
    for use in (len, iter, lambda one: one[0], lambda one: 3 in one):
        with pytest.raises(TypeError):
            use(fast)


def test_dir_has_what_can_be_asked_for(pair: tuple[nn.Sequential, Any]) -> None:
    model, fast = pair
    assert set(dir(model)) | {"explain", "lower", "cache_info"} <= set(dir(fast))


def test_copies_and_pickles(pair: tuple[nn.Sequential, Any], device: torch.device) -> None:
    model, fast = pair
    x = torch.randn(4, 3, device=device)
    again = copy.deepcopy(fast)
    assert len(again) == 3
    assert again[0] is not model[0]
    torch.testing.assert_close(again(x), model(x))
    loaded = pickle.loads(pickle.dumps(pygraph.jit(nn.Sequential(nn.ReLU()))))
    assert isinstance(loaded, TransformedModule)
    assert len(loaded) == 1


def test_below_torch_compile(pair: tuple[nn.Sequential, Any], device: torch.device, fresh_dynamo: None) -> None:
    model, fast = pair
    x = torch.randn(4, 3, device=device)

    def last(x: torch.Tensor) -> torch.Tensor:
        return fast(x) + len(fast)

    torch.testing.assert_close(torch.compile(last, backend="eager")(x), model(x) + 3)
