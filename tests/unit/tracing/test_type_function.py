"""``type(x)`` in a traced function: the class of eager."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import pygraph
from pygraph.tracing.type_function import TypeFunction

PARAMETER = nn.Parameter(torch.ones(()))


class Model(nn.Module):
    """A module whose ``forward`` asks for the class of its input."""

    kinds = (Tensor, nn.Parameter)

    def forward(self, x: Tensor, k: Any) -> Tensor:
        """The input, twice if it is a tensor."""
        return x * 2 if type(x) in self.kinds and self.is_number(k) else x

    @staticmethod
    def is_number(k: Any) -> bool:
        """Whether a value is a number, and no other class."""
        return type(k) in (int, float)


def of_an_argument(x: Any, k: Any) -> Any:
    return x * 2 if type(x) is Tensor else x * 3


def of_a_result(x: Any, k: Any) -> Any:
    y = x * 2
    return y + 1 if type(y) == Tensor else y  # noqa: E721


def of_a_number(x: Any, k: Any) -> Any:
    return x * 2 if type(k) is int else x * 3 if type(k) is float else x


def of_a_computed_number(x: Any, k: Any) -> Any:
    return x * 2 if type(k * 2) is int else x * 3 if type(k * 2) is float else x


def of_a_comparison(x: Any, k: Any) -> Any:
    return x * 2 if type(k > 0) is bool else x


def of_a_table(x: Any, k: Any) -> Any:
    return {Tensor: lambda: x * 2, int: lambda: x * 3}[type(x)]()


def of_a_parameter(x: Any, k: Any) -> Any:
    return x * 2 if type(PARAMETER) is nn.Parameter and type(PARAMETER * 1) is Tensor else x


def inside(x: Any, k: Any) -> Any:
    def is_tensor(value: Any) -> bool:
        return type(value) is Tensor

    return [one * 2 for one in (x, x + k) if is_tensor(one)]


def of_classes(x: Any, k: Any) -> Any:
    class Meta(type):
        pass

    class Made(metaclass=Meta):
        pass

    other = type("Other", (Made,), {"scale": 2})
    is_class = isinstance(other, type) and issubclass(Meta, type) and type(Meta) is type and not isinstance(x, type)
    return x * getattr(other, "scale", 1) if is_class and type(other) is Meta and type(types) is types.ModuleType else x


def of_its_name(x: Any, k: Any) -> Any:
    return x * len(type(x).__name__), type(x).__name__


def as_an_attribute(x: Any, k: Any) -> Any:
    return x * 2 if x.__class__ is Tensor and (x * 2).__class__ == Tensor and k.__class__ in (int, float) else x * 3


def of_a_name(x: Any, k: Any) -> Any:
    return x * 2 if x.__class__.__name__ == "Tensor" else x * 3


FUNCTIONS = (
    as_an_attribute, of_a_name,
    of_an_argument, of_a_result, of_a_number, of_a_computed_number, of_a_comparison, of_a_table, of_a_parameter, inside,
    of_classes, of_its_name, Model(),
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: getattr(one, "__name__", "module"))
def test_the_class_is_that_of_eager(device: torch.device, function: Callable[..., Any]) -> None:
    fast, x = pygraph.jit(function), torch.ones(3, device=device)
    for k in (1, 2, 3, 0.5, 1.5, 2.5, np.float64(3.5)):
        found, expected = fast(x, k), function(x, k)
        torch.testing.assert_close(found, expected, rtol=0, atol=0) if isinstance(expected, Tensor) else None
        assert str(found) == str(expected)
    assert not isinstance(globals().get("type"), TypeFunction)
    assert "__getattribute__" not in vars(FakeTensor)
    assert type(x) is Tensor


def test_such_calls_are_graphs(device: torch.device) -> None:
    for function in (of_an_argument, of_a_number, of_a_table, Model()):
        fast, x = pygraph.jit(function, strict=True), torch.ones(3, device=device)
        for k in (1, 2, 3, 4):
            assert torch.equal(fast(x, k), function(x, k))
        assert fast.cache_info().captures <= 2


def test_an_argument_that_is_a_parameter(device: torch.device) -> None:
    def function(x: Any) -> Any:
        return x.detach() * (2 if type(x) is nn.Parameter else 3 if type(x) is Tensor else 4)

    fast = pygraph.jit(function)
    for x in (torch.ones(3, device=device), nn.Parameter(torch.ones(3, device=device))) * 2:
        assert torch.equal(fast(x), function(x))


def test_of_what_another_thread_traces() -> None:
    """``type`` is replaced in whole modules, also for threads that are in no trace of ours."""
    with FakeTensorMode():
        fake = torch.ones(2)
    assert TypeFunction(type)(fake) is FakeTensor
