"""One tensor passed several times to a call that is differentiated outside, of which not all results are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "both in both": lambda q, k: (q.sin() * k, k.cos() * q),
    "both in the first": lambda q, k: (q.sin() * k, k.cos()),
    "both in the second": lambda q, k: (q.sin(), q * k * 2),
    "one alone": lambda q, k: (q.sin(), q.cos()),
    "by identity": lambda q, k: (q.sin(), k.cos()) if q is k else (q * k, k.exp()),
    "written to": lambda q, k: (q.clone().mul_(k), k * q.exp()),
}


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(device: torch.device, name: str, used: tuple[int, ...]) -> None:
    function = FUNCTIONS[name]
    weight = torch.linspace(-1, 1, 3, device=device, requires_grad=True)
    other = torch.linspace(0.5, 2, 3, device=device, requires_grad=True)

    def gradients(fn: Callable[..., Any], *, same: bool) -> list[Tensor | None]:
        x = weight * 2
        results = fn(x, x if same else other * 1)
        loss = sum((results[index].pow(2).sum() for index in used), start=torch.zeros((), device=device))
        return list(torch.autograd.grad(loss, [weight, other], allow_unused=True))

    fast = pygraph.jit(function)
    for same in (True, True, False, True, False):
        torch.testing.assert_close(gradients(fast, same=same), gradients(function, same=same))


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_of_a_tensor_to_itself(device: torch.device, need_weights: bool) -> None:
    attention = nn.MultiheadAttention(4, 2).to(device)
    fast = pygraph.jit(attention)
    weight = torch.linspace(-1, 1, 8, device=device).view(2, 1, 4).requires_grad_()

    def gradients(fn: Callable[..., Any]) -> list[Tensor]:
        x = weight * 2
        loss = fn(x, x, x, need_weights=need_weights)[0].pow(2).sum()
        return list(torch.autograd.grad(loss, [weight, *attention.parameters()]))

    for _ in range(3):
        torch.testing.assert_close(gradients(fast), gradients(attention))


def penalty(fn: Callable[..., Any], x: Tensor, count: int) -> list[Tensor]:
    """The gradient of a result, and that of its square."""
    result = fn(*[x] * count)
    result = result[0] if isinstance(result, tuple) else result
    (first,) = torch.autograd.grad(result.pow(2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sin().sum(), x)
    return [first, second, third]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_gradients(device: torch.device, name: str) -> None:
    function = FUNCTIONS[name]
    fast = pygraph.jit(function)
    for scale in (1.0, 2.0, 3.0):
        x = torch.linspace(-1, 1, 3, device=device, dtype=torch.float64).mul(scale).requires_grad_()
        torch.testing.assert_close(penalty(fast, x, 2), penalty(function, x, 2))


def test_a_gradient_penalty_of_attention_to_itself(device: torch.device) -> None:
    attention = nn.MultiheadAttention(4, 2, dtype=torch.float64).to(device)
    fast = pygraph.jit(attention)
    for scale in (1.0, 2.0, 3.0):
        x = torch.linspace(-1, 1, 8, device=device, dtype=torch.float64).mul(scale).view(2, 1, 4).requires_grad_()
        torch.testing.assert_close(penalty(fast, x, 3), penalty(attention, x, 3))


def test_tangents_of_gradients(device: torch.device) -> None:
    """Forward mode over a gradient that is taken outside."""
    function = FUNCTIONS["both in the first"]
    x = torch.linspace(-1, 1, 3, device=device)

    def gradient(fn: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return torch.func.grad(lambda x: fn(x, x)[0].pow(2).sum())

    fast = pygraph.jit(function)
    for _ in range(3):
        got = torch.func.jvp(gradient(fast), (x,), (x.cos(),))
        torch.testing.assert_close(got, torch.func.jvp(gradient(function), (x,), (x.cos(),)))
        hessian = torch.func.hessian(lambda x: fast(x, x)[0].pow(2).sum())(x)
        torch.testing.assert_close(hessian, torch.func.hessian(lambda x: function(x, x)[0].pow(2).sum())(x))


def test_a_parameter_that_is_an_argument(device: torch.device) -> None:
    """A function closes over a tensor that it is passed as well."""
    weight = torch.linspace(-1, 1, 3, device=device, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return x.sin() * weight + weight.pow(3)

    fast = pygraph.jit(function)
    for _ in range(3):
        torch.testing.assert_close(penalty(fast, weight, 1), penalty(function, weight, 1))
