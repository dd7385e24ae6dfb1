"""Functions that use torch.func by themselves, on tensors that they close over and that are transformed outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import pygraph

Inner = Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]
Outer = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]


def loss(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).pow(2).sum()


INNER: dict[str, Inner] = {
    "grad": lambda loss, w, x: grad(loss)(w, x),
    "grad of grad": lambda loss, w, x: grad(lambda w: grad(loss)(w, x).sin().sum())(w),
    "vmap": lambda loss, w, x: vmap(lambda row: (row * row).sum())(w).sum() * x.sum(),
    "vmap of grad": lambda loss, w, x: vmap(grad(loss), (None, 0))(w, x).sum(0),
    "vjp": lambda loss, w, x: vjp(lambda w: loss(w, x), w)[1](x.new_ones(()))[0],
    "jvp": lambda loss, w, x: jvp(lambda w: loss(w, x), (w,), (w,))[1],
    "jacrev": lambda loss, w, x: jacrev(lambda w: torch.tanh(x @ w))(w).sum((0, 1)),
    "jacrev of grad": lambda loss, w, x: jacrev(grad(loss))(w, x).sum((0, 1)),
}


def _leaf_grad(f: Callable[[Tensor], Tensor], w: Tensor) -> Any:
    w.requires_grad_()
    return torch.autograd.grad((f(w) ** 2).sum(), w)[0]


OUTER: dict[str, Outer] = {
    "vmap": lambda f: lambda w: vmap(f)(torch.stack([w, w + 0.1])),
    "grad": lambda f: grad(lambda w: (f(w) ** 2).sum()),
    "vmap of grad": lambda f: lambda w: vmap(grad(lambda w: (f(w) ** 2).sum()))(torch.stack([w, w + 0.1])),
    "jvp": lambda f: lambda w: jvp(f, (w,), (w.cos(),)),
    "autograd": lambda f: lambda w: _leaf_grad(f, w),
}


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
def test_what_a_function_closes_over_is_differentiated_inside_it_too(
    inner: str, outer: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    w, x = torch.randn(4, 4, device=device, dtype=torch.float64), torch.randn(3, 4, device=device, dtype=torch.float64)
    cell = {"w": w}

    def run(x: Tensor) -> Tensor:
        return INNER[inner](loss, cell["w"], x)

    compiled = pygraph.jit(run)

    def closed(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def called(w: Tensor) -> Tensor:
            cell["w"] = w
            return function(x)

        return called

    expected = OUTER[outer](closed(run))(w.clone())
    torch.testing.assert_close(OUTER[outer](closed(compiled))(w.clone()), expected)
    if outer != "autograd":  # whose leaves are read where they are
        known = compiled.cache_info()
        torch.testing.assert_close(OUTER[outer](closed(compiled))(w.clone()), expected)
        assert known.captures
        assert compiled.cache_info().captures == known.captures
        assert compiled.cache_info().misses == known.misses
    assert not [line for line in str(compiled.explain()).splitlines() if "the call" in line]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_module_whose_parameters_each_step_replaces_is_known_for_each(steps: int, device: torch.device) -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 1).double().to(device)
    params = {name: value.detach() for name, value in module.named_parameters()}
    x, y = torch.randn(4, 5, 3, device=device).double(), torch.randn(4, 5, 1, device=device).double()

    def outer(net: Any) -> Callable[[dict[str, Tensor]], Tensor]:
        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return (functional_call(net, params, (x,)).tanh() - y).square().mean()

        def task(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            for _ in range(steps):
                gradients = grad(loss)(params, x, y)
                params = {name: value - 0.1 * gradients[name] for name, value in params.items()}
            return loss(params, x, y)

        return lambda params: vmap(task, (None, 0, 0))(params, x, y).mean()

    compiled = pygraph.jit(module)
    expected = grad(outer(module))(params)
    torch.testing.assert_close(grad(outer(compiled))(params), expected)
    known = compiled.cache_info()
    torch.testing.assert_close(grad(outer(compiled))(params), expected)
    assert (compiled.cache_info().captures, compiled.cache_info().misses) == (known.captures, known.misses)
