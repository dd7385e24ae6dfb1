"""Several results of one call, each differentiated by a backward of its own, as losses of an actor and a critic are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.autograd.pullback import Pullback
from pygraph.process import extension

CALLS = 4


def of_each(a: Tensor, v: Tensor, models: Any, optimizers: Any) -> None:
    a.square().mean().backward()
    v.square().mean().backward()


def in_turn(a: Tensor, v: Tensor, models: Any, optimizers: Any) -> None:
    v.square().mean().backward(retain_graph=True)
    optimizers[1].step()
    a.square().mean().backward()
    optimizers[0].step()


def of_some(a: Tensor, v: Tensor, models: Any, optimizers: Any) -> None:
    for result, model in ((v, models[1]), (a, models[0])):
        weights = list(model.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(result.sum(), weights), strict=True):
            weight.grad = gradient


def of_inputs(a: Tensor, v: Tensor, models: Any, optimizers: Any) -> None:
    a.sum().backward(inputs=list(models[0].parameters()))
    v.sum().backward(inputs=list(models[1].parameters()))


@pytest.mark.parametrize("differentiate", [of_each, in_turn, of_some, of_inputs])
@pytest.mark.parametrize("is_deep", [False, True])
def test_results_that_have_no_operation_in_common(device: torch.device, differentiate: Any, is_deep: bool) -> None:
    def make() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        models: list[nn.Module] = []
        for size in (2, 1):
            layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, size)] if is_deep else [nn.Linear(3, size)]
            models.append(nn.Sequential(*layers).to(device))
        return models, [torch.optim.SGD(one.parameters(), 0.1) for one in models]

    found: list[list[Tensor | None]] = []
    for decorate in (pygraph.jit, lambda fn: fn):
        models, optimizers = make()
        function = decorate(lambda x, models=models: (models[0](x), models[1](x)))
        for k in range(CALLS):
            for one in optimizers:
                one.zero_grad()
            differentiate(*function(torch.full((2, 3), 1.0 + k, device=device)), models, optimizers)
            found.append(
                [
                    one
                    for model in models
                    for weight in model.parameters()
                    for one in (weight.detach().clone(), weight.grad)
                ]
            )
    for one, other in zip(found[:CALLS], found[CALLS:], strict=True):
        torch.testing.assert_close(one, other)


WAYS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "of two": lambda x, w: ((x * w).exp(), (x + w).exp()),
    "of three": lambda x, w: ((x * w).exp(), (x + w).exp(), x * 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_result_is_differentiated_once(device: torch.device, way: str) -> None:
    x = torch.linspace(-1, 1, 4, device=device)
    fast, w = pygraph.jit(WAYS[way]), torch.ones(4, device=device, requires_grad=True)
    for _ in range(CALLS):
        first, second, *_ = fast(x, w)
        first.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            first.sum().backward()
        second.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            second.sum().backward()
        w.grad = None


def test_an_updated_tensor_is_an_error_for_who_reads_it(device: torch.device) -> None:
    x = torch.linspace(-1, 1, 4, device=device)
    for _ in range(CALLS):
        w = torch.ones(4, device=device, requires_grad=True)
        v = torch.ones(4, device=device, requires_grad=True)
        a, b = pygraph.jit(lambda x, w=w, v=v: ((x * w).exp(), x * v * v))(x)
        with torch.no_grad():
            v.add_(1)
        a.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            b.sum().backward()


class Layers(nn.Module):
    """A model that returns the output of each layer, and a loss."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.p = p
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden: list[Tensor] = []
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).tanh(), self.p) + x
            hidden.append(x)
        self.kept = [hidden[0] * 2]
        return {"hidden": hidden, "loss": (hidden[-1] - self.kept[0]).square().mean()}


def retained(model: Layers, found: dict[str, Any], seen: list[Any]) -> None:
    for one in found["hidden"]:
        one.retain_grad()
    found["loss"].backward()
    seen += [one.grad for one in found["hidden"]]


def hooked(model: Layers, found: dict[str, Any], seen: list[Any]) -> None:
    for one in found["hidden"]:
        one.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 0.5)
    found["loss"].backward()


def captured(model: Layers, found: dict[str, Any], seen: list[Any]) -> None:
    seen += torch.autograd.grad(found["loss"], [found["hidden"][1], found["hidden"][0], model.layers[2].weight])


def of_a_batch(model: Layers, found: dict[str, Any], seen: list[Any]) -> None:
    last, (first, second, _) = torch.eye(8, device=found["loss"].device).view(8, 2, 4), found["hidden"]
    seen += torch.autograd.grad(found["hidden"][2], [second, first], last, is_grads_batched=True)


def kept(model: Layers, found: dict[str, Any], seen: list[Any]) -> None:
    model.kept[0].retain_grad()
    found["loss"].backward()
    seen.append(model.kept[0].grad)


def repeated(model: Layers, found: dict[str, Any], seen: list[Any]) -> None:
    first = found["hidden"][0]
    seen += torch.autograd.grad(found["loss"], [first], retain_graph=True)
    seen += torch.autograd.grad(found["loss"], [first])
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(found["loss"], [first])
    first.sum().backward()


def through_another_call(model: Layers, found: dict[str, Any], seen: list[Any]) -> None:
    other = pygraph.jit(lambda x: (x.sin(), x.sin().sum()))
    _, loss = other(found["hidden"][1])
    found["hidden"][1].retain_grad()
    (loss + found["loss"]).backward()
    seen.append(found["hidden"][1].grad)


@pytest.mark.parametrize(
    "differentiate", [retained, hooked, captured, of_a_batch, kept, repeated, through_another_call]
)
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("native", [True, False])
def test_gradients_of_results_that_others_are_computed_from(
    device: torch.device, differentiate: Any, p: float, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(extension, "loaded", lambda: None)
    found: list[list[Any]] = []
    for decorate in (lambda fn: fn, pygraph.jit):
        torch.manual_seed(0)
        model = Layers(p).to(device)
        function = decorate(model)
        for k in range(CALLS):
            torch.manual_seed(k)
            model.zero_grad()
            seen: list[Any] = []
            differentiate(model, function(torch.full((2, 4), 1.0 + k, device=device)), seen)
            found.append([*seen, *(weight.grad for weight in model.parameters())])
    for one, other in zip(found[:CALLS], found[CALLS:], strict=True):
        torch.testing.assert_close(other, one)


RELATED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "not at all": lambda x, w: ((x * w).exp(), (x + w).sum()),
    "one of the other": lambda x, w: (lambda h: (h, h.sum()))((x * w).exp()),
    "a view of the other": lambda x, w: (lambda h: (h, h.view(2, 2)))((x * w).exp()),
    "of one operation": lambda x, w: tuple((x * w).split(2)),  # pyright: ignore[reportReturnType]
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("how", RELATED)
def test_a_hook_sees_a_result_only_where_it_is_differentiated(
    device: torch.device, how: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(extension, "loaded", lambda: None)
    fast, w = pygraph.jit(RELATED[how]), torch.ones(4, device=device, requires_grad=True)
    seen: list[Tensor] = []
    for _ in range(CALLS):
        first, second = fast(torch.ones(4, device=device), w)
        second.register_hook(seen.append)
        first.sum().backward()
        assert [one for one in seen if one is not None] == []
        if how != "of one operation":  # of which eager calls it with None, too
            assert not seen


def test_nobody_looks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then one backward computes all gradients, as if there were no results but the last one."""
    backwards: list[int] = []
    pull_back = Pullback.pull_back_result
    monkeypatch.setattr(
        Pullback,
        "pull_back_result",
        lambda self, index, *rest: backwards.append(index) or pull_back(self, index, *rest),
    )
    torch.manual_seed(0)
    model = Layers().to(device)
    fast = pygraph.jit(model)
    for _ in range(CALLS):
        found = fast(torch.ones(2, 4, device=device))
        found["loss"].backward()
    if extension.loaded() is not None:  # without it, somebody may
        assert not backwards
    assert model.layers[0].weight.grad is not None
    found = fast(torch.ones(2, 4, device=device))
    found["hidden"][0].retain_grad()
    found["loss"].backward()
    assert backwards


def test_a_second_derivative_through_results_is_an_error(device: torch.device) -> None:
    model = Layers().to(device)
    fast = pygraph.jit(model)
    x = torch.ones(2, 4, device=device)
    for _ in range(2):
        fast(x)  # the first call runs as it is
    for _ in range(CALLS):
        found = fast(x)
        (gradient,) = torch.autograd.grad(found["loss"], [found["hidden"][0]], create_graph=True)
        with pytest.raises(RuntimeError, match="a gradient of one result of a call for another one"):
            gradient.sum().backward()
        (gradient,) = torch.autograd.grad(
            fast(torch.ones(2, 4, device=device))["loss"], [model.layers[0].weight], create_graph=True
        )
        gradient.square().sum().backward()


class Injecting(torch.autograd.Function):
    """Its gradient does not come of what it is passed alone, as that of some auxiliary losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient + 1


def test_a_custom_function_runs_once(device: torch.device) -> None:
    w = torch.ones(4, device=device, requires_grad=True)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = Injecting.apply(x * w) * 2  # pyright: ignore[reportOptionalOperand]
        return hidden, (hidden * w).sum()

    fast = pygraph.jit(fn)
    for _ in range(CALLS):
        gradients = []
        for function in (fn, fast):
            hidden, loss = function(torch.ones(4, device=device))
            hidden.register_hook(lambda gradient: gradient)
            gradients += torch.autograd.grad(loss, [w])
        assert torch.equal(*gradients)


def test_a_weight_of_both_parts(device: torch.device) -> None:
    w = torch.linspace(-1, 1, 9, device=device).view(3, 3).requires_grad_()

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = (x @ w).tanh()
        second = first @ w + first
        return first, second, (second * first @ w).sum()

    fast = pygraph.jit(fn)
    for k in range(CALLS):
        found: list[list[Tensor | None]] = []
        for function in (fn, fast):
            first, second, loss = function(torch.full((2, 3), 1.0 + k, device=device))
            first.retain_grad()
            second.retain_grad()
            loss.backward()
            found.append([first.grad, second.grad, w.grad])
            w.grad = None
        torch.testing.assert_close(*found)
