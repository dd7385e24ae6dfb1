"""Functions of a user's own (`torch.autograd.Function`) that return memory of their input, with another gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph


class Rerouted(torch.autograd.Function):
    """Returns both inputs; the gradient of the first one goes to the second one."""

    @staticmethod
    def forward(ctx: Any, time: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The inputs."""
        ctx.save_for_backward(time, state)
        return time.detach(), state.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        """The gradient of the second input."""
        _, state = ctx.saved_tensors
        return None, gradients[1] + gradients[0] * state


def rerouted(*inputs: Tensor) -> Any:
    return Rerouted.apply(*inputs)  # pyright: ignore[reportUnknownMemberType]


def alone(time: Tensor, state: Tensor) -> Any:
    return rerouted(time, state)


def behind_an_operation(time: Tensor, state: Tensor) -> Any:
    return rerouted(time, state * 2)


def behind_a_question(time: Tensor, state: Tensor) -> Any:
    return rerouted(time, state * 2 if state.sum() > 0 else state)


@pytest.mark.parametrize("is_differentiated", [True, False])
@pytest.mark.parametrize("function", [alone, behind_an_operation, behind_a_question])
def test_the_gradient_is_that_of_the_function(
    device: torch.device, function: Callable[[Tensor, Tensor], Any], is_differentiated: bool
) -> None:
    fast, found = pygraph.jit(function), list[list[Any]]()
    for fn in (fast, function):
        for number in range(4):
            time = torch.full((), 1.0 + number, device=device, requires_grad=is_differentiated)
            state = torch.full((3,), 2.0 + number, device=device, requires_grad=True)
            one, other = fn(time, state)
            (one * 3 + other.sum()).backward()
            assert state.grad is not None
            gradient = None if time.grad is None else time.grad.item()
            found.append([one.item(), other.tolist(), state.grad.tolist(), gradient, one.requires_grad])
    assert found[:4] == found[4:]
