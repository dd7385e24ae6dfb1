"""A transformed module shares everything with the original."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import pygraph
from pygraph.api.module import TransformedModule


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.scale = 1.0

    def forward(self, x: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
        return self.dropout(self.norm(self.linear(x))) * self.scale + bias

    def features(self) -> int:
        return 3


@pytest.fixture
def pair(device: torch.device) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model().to(device).eval()
    return model, pygraph.jit(model)


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(12.0, device=device).view(4, 3)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def test_it_is_a_module_with_the_same_state(pair: tuple[Model, Any]) -> None:
    model, fast = pair
    assert isinstance(fast, TransformedModule)
    assert isinstance(fast, nn.Module)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(fast.parameters(), model.parameters(), strict=True))
    assert dict(fast.named_modules()).keys() == dict(model.named_modules()).keys()
    assert fast.linear is model.linear
    assert fast.features() == 3
    assert repr(fast).startswith("pygraph Model(")


def test_calls_agree(pair: tuple[Model, Any], x: torch.Tensor) -> None:
    model, fast = pair
    for bias in (0.0, 1.5):
        torch.testing.assert_close(fast(x, bias=bias), model(x, bias=bias))
    assert fast.cache_info()[:2] == (1, 1)
    torch.testing.assert_close(fast.forward(x), model(x))


def test_train_and_eval_are_shared(pair: tuple[Model, Any], x: torch.Tensor) -> None:
    model, fast = pair
    fast(x)
    assert fast.train() is fast
    assert model.training
    assert model.dropout.training
    torch.manual_seed(1)
    got = fast(x)
    mean = model.norm.running_mean.clone()
    model.norm.reset_running_stats()
    torch.manual_seed(1)
    torch.testing.assert_close(got, model(x))
    torch.testing.assert_close(mean, model.norm.running_mean)
    model.eval()
    assert not fast.training
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("grad", [True, False])
def test_graphs_of_both_modes_stay(pair: tuple[Model, Any], x: torch.Tensor, grad: bool) -> None:
    """Each mode's first call once threw away what the other had."""
    model, fast = pair
    reference = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.set_grad_enabled(grad):
        found = [fast.train(call % 2 == 1)(x).detach() for call in range(6)]
        torch.manual_seed(0)
        expected = [reference.train(call % 2 == 1)(x).detach() for call in range(6)]
    torch.testing.assert_close(found, expected)
    assert fast.cache_info().captures == 2


def test_attributes_are_set_on_the_original(pair: tuple[Model, Any], x: torch.Tensor) -> None:
    model, fast = pair
    fast(x)
    fast.scale = 3.0
    assert model.scale == 3.0
    torch.testing.assert_close(fast(x), model(x))
    fast.linear = nn.Linear(3, 3).to(x.device)
    assert model.linear is fast.linear
    torch.testing.assert_close(fast(x), model(x))
    fast.extra = nn.Parameter(torch.ones(1))
    assert "extra" in dict(model.named_parameters())
    del fast.extra
    assert not hasattr(model, "extra")


@pytest.mark.parametrize("update", ["load_state_dict", "assign", "in place", "data", "double", "to cpu and back"])
def test_parameters_are_found_again(pair: tuple[Model, Any], x: torch.Tensor, update: str) -> None:
    model, fast = pair
    fast(x)
    fast(x)
    other = Model().to(x.device)
    match update:
        case "load_state_dict":
            fast.load_state_dict(other.state_dict())
        case "assign":
            model.load_state_dict(other.state_dict(), assign=True)
        case "in place":
            model.linear.weight.mul_(2)
        case "data":
            model.linear.weight.data = torch.ones(3, 3, device=x.device)
        case "double":
            fast.double()
            x = x.double()
        case _:
            fast.to("cpu")
            model.linear.weight.add_(1)
            fast.to(x.device)
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x))


def test_hooks_run_and_are_seen(pair: tuple[Model, Any], x: torch.Tensor) -> None:
    model, fast = pair
    fast(x)
    handle = fast.register_forward_hook(lambda module, args, out: out * 10)
    torch.testing.assert_close(fast(x), model(x))
    inner = model.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    torch.testing.assert_close(fast(x), model(x))
    handle.remove()
    inner.remove()
    torch.testing.assert_close(fast(x), model(x))


def test_inside_another_module(pair: tuple[Model, Any], x: torch.Tensor) -> None:
    model, fast = pair
    outer = nn.Sequential(fast, nn.ReLU())
    torch.testing.assert_close(outer(x), torch.relu(model(x)))
    torch.testing.assert_close(pygraph.jit(outer)(x), torch.relu(model(x)))
    assert list(outer.state_dict()) == [f"0.{name}" for name in model.state_dict()]


def test_a_part_of_a_model_can_be_transformed(pair: tuple[Model, Any], x: torch.Tensor) -> None:
    model, _ = pair
    expected = model(x)
    model.linear = pygraph.jit(model.linear)
    torch.testing.assert_close(model(x), expected)
    assert sorted(model.state_dict())[:2] == ["linear.bias", "linear.weight"]


def test_a_forward_that_calls_the_one_of_before(pair: tuple[Model, Any], x: torch.Tensor) -> None:
    """Libraries wrap ``module.forward`` in this way, as accelerate does."""
    model, fast = pair
    wanted = model(x)
    before = fast.forward
    fast.forward = lambda *args: before(*args) * 2
    for _ in range(3):
        torch.testing.assert_close(fast(x), wanted * 2)
        torch.testing.assert_close(model(x), wanted * 2)
    assert fast.explain().to_dict()["kernels_in_graphs"] > 0
    del fast.forward
    torch.testing.assert_close(fast(x), wanted)
    torch.testing.assert_close(fast.forward(x), wanted)


def test_deepcopy_is_independent(pair: tuple[Model, Any], x: torch.Tensor) -> None:
    model, fast = pair
    fast(x)
    other = copy.deepcopy(fast)
    other.linear.weight.zero_()
    assert not torch.equal(model.linear.weight, other.linear.weight)
    torch.testing.assert_close(fast(x), model(x))
    assert not torch.allclose(other(x), fast(x))


def test_explain_names_the_module(pair: tuple[Model, Any], x: torch.Tensor) -> None:
    _, fast = pair
    fast(x)
    assert "Model" in str(fast.explain())
    assert fast.lower(x).compile()(x).shape == (4, 3)
    fast.cache_clear()
    assert fast.cache_info().size == 0


@pytest.mark.parametrize("name", ["layer", "encoder", "attention", "without weights", "padded layer", "causal layer"])
def test_attention_modules_take_the_way_that_they_take_in_eager(device: torch.device, name: str) -> None:
    """Their one operation for everything rounds otherwise than its parts, which they would use under a mode."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().to(device)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval().to(device)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    padding, causal = padding.to(device), torch.nn.Transformer.generate_square_subsequent_mask(5).to(device)
    calls: dict[str, Any] = {
        "layer": layer,
        "encoder": encoder,
        "attention": lambda x: attention(x, x, x),
        "without weights": lambda x: attention(x, x, x, need_weights=False),
        "padded layer": lambda x: layer(x, src_key_padding_mask=padding),
        "causal layer": lambda x: layer(x, src_mask=causal, is_causal=True),
    }
    function = pygraph.jit(calls[name])
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 5, 16, device=device)
            got, expected = function(x), calls[name](x)
            for result, reference in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
                if reference is not None:
                    torch.testing.assert_close(result, reference, rtol=0, atol=0)
    assert not function.explain().to_dict()["fallbacks"]
    assert not torch.overrides.has_torch_function((x,))


def test_a_mode_inside_a_function_is_seen_by_attention_modules(device: torch.device) -> None:
    class Doubled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.nn.functional.relu else result

    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().to(device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with Doubled():
            return layer(x)

    function = pygraph.jit(fn)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 5, 16, device=device)
            torch.testing.assert_close(function(x), fn(x))
