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
