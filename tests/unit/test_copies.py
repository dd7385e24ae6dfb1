"""Pickles and copies of transformed functions: the function and its options, none of its graphs."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.calls.transformed import Transformed


@pygraph.jit(max_graphs=3)
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def plain(x: torch.Tensor, k: float = 2.0) -> torch.Tensor:
    return x * k


class Model:
    """Methods, decorated in the class and wrapped on an instance."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.fast = pygraph.jit(self.slow)

    @staticmethod
    @pygraph.jit
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @pygraph.jit
    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def slow(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + 1


COPIES = {"pickle": lambda value: pickle.loads(pickle.dumps(value)), "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(3.0, device=device)


@pytest.mark.parametrize("how", COPIES)
def test_a_decorated_function(x: torch.Tensor, how: str) -> None:
    decorated(x)
    again = COPIES[how](decorated)
    assert again is decorated, "it goes by its name, as functions do"
    assert torch.equal(again(x), x * 2 + 1)


def test_a_decorated_static_method_goes_by_its_qualified_name(x: torch.Tensor) -> None:
    assert pickle.loads(pickle.dumps(Model.double)) is Model.double
    assert pickle.loads(pickle.dumps(Model.times)) is Model.times


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: pygraph.jit(plain, max_graphs=2, static_argnums=1), lambda x: x * 2),
        (lambda: pygraph.jit(functools.partial(plain, k=3.0)), lambda x: x * 3),
        (lambda: pygraph.graphify(pygraph.indirect(plain)), lambda x: x * 2),
        (lambda: Model(5.0).fast, lambda x: x * 5 + 1),
        (lambda: functools.partial(decorated), lambda x: x * 2 + 1),
    ],
)
def test_wrapped_functions(x: torch.Tensor, how: str, make: Any, expected: Any) -> None:
    original = make()
    original(x)
    again = COPIES[how](original)
    assert torch.equal(again(x), expected(x))
    if isinstance(original, Transformed):
        assert again is not original
        assert (again.options, again.passes) == (original.options, original.passes)
        assert again.cache_info()[:2] == (0, 1), "the graphs stay with the original"
        assert torch.equal(original(x), expected(x))
        assert original.cache_info()[:2] == (1, 1)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_an_object_with_a_jitted_method_of_its_own(x: torch.Tensor, how: str) -> None:
    model = Model(2.0)
    model.fast(x)
    again = COPIES[how](model)
    again.scale = 7.0
    assert torch.equal(again.fast(x), x * 7 + 1)
    assert torch.equal(model.fast(x), x * 2 + 1)


def test_what_cannot_be_pickled_says_so_as_python_does(x: torch.Tensor) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(pygraph.jit(lambda x: x))


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_modules(device: torch.device, how: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(device if how == "deepcopy" else "cpu")
    nn.init.ones_(module[0].weight)  # so that not all is negative
    fast = pygraph.jit(module, max_graphs=5)
    with torch.no_grad():
        again = COPIES[how](fast).to(device)
        x = torch.ones(2, 3, device=device)
        torch.testing.assert_close(again(x), module.to(device)(x))
        again.get_submodule("0").weight.zero_()
        assert not torch.equal(again(x), fast(x))
    assert again._pygraph_transformed.options == fast._pygraph_transformed.options


def test_a_module_that_holds_a_jitted_function(device: torch.device) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.fast = pygraph.jit(self.slow)

        def slow(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fast(x)

    net = Net().to(device)
    x = torch.ones(2, 3, device=device)
    with torch.no_grad():
        net(x)
        again = copy.deepcopy(net)
        again.weight.fill_(4)
        assert torch.equal(again(x), x * 4)
        assert torch.equal(net(x), x)
