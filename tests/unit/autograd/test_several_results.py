"""Several results of one call, each differentiated by a backward of its own, as losses of an actor and a critic are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph

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
