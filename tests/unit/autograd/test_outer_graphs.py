"""Backwards inside of a call that go on into a graph of autograd from before it: eager's, and never a trace's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph


class Holder:
    """A tensor with a graph, in an attribute."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Model:
    """A weight, a tensor that depends on it, and functions that differentiate through that."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(3, 3).to(device).requires_grad_()
        self.y = self.weight
        self.pending: list[Tensor] = []

    def of_attribute(self, x: Tensor) -> Tensor:
        loss = (self.y.exp() * x).mean()
        loss.backward()
        return loss.detach()

    def retained(self, x: Tensor) -> Tensor:
        loss = (self.y.exp() * x).mean()
        loss.backward(retain_graph=True)
        return loss.detach()

    def itself(self, x: Tensor) -> Tensor:
        self.y.sum().backward(retain_graph=True)
        self.y.backward(x)
        return x + 1

    def by_weight(self, x: Tensor) -> Tensor:
        return torch.autograd.grad((self.y.exp() * x).mean(), self.weight)[0]

    def by_tensor(self, x: Tensor) -> Tensor:
        return torch.autograd.grad((self.y.exp() * x).mean(), self.y)[0]

    def collected(self, x: Tensor) -> Tensor:
        self.pending.append((x @ self.weight).tanh().mean())
        if len(self.pending) < 2:
            return x.sum()
        total = torch.stack(self.pending).sum()
        total.backward()
        self.pending = []
        return total.detach()


FUNCTIONS = ["of_attribute", "retained", "itself", "by_weight", "by_tensor", "collected"]


def played(device: torch.device, name: str, jitted: bool) -> Any:
    model, found = Model(device), list[Any]()
    function: Callable[..., Any] = getattr(model, name)
    run = pygraph.jit(function) if jitted else function
    for i in range(5):
        x = torch.randn(3, 3, generator=torch.Generator().manual_seed(i)).to(device)
        model.y = (x @ model.weight).tanh()
        found.append((run(x), None if model.weight.grad is None else model.weight.grad.clone()))
        assert type(model.weight.grad) in (Tensor, type(None))
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_in_eager(device: torch.device, name: str) -> None:
    torch.testing.assert_close(played(device, name, jitted=True), played(device, name, jitted=False))


def test_of_an_object_among_the_arguments(device: torch.device) -> None:
    weight = torch.ones(3, 3, device=device, requires_grad=True)

    def function(holder: Holder) -> Tensor:
        loss = (holder.y.exp() * holder.y).mean()
        loss.backward()
        return loss.detach()

    fast, x = pygraph.jit(function), torch.ones(3, 3, device=device)
    for _ in range(4):
        expected = function(Holder((x @ weight).tanh()))
        torch.testing.assert_close(fast(Holder((x @ weight).tanh())), expected)
    torch.testing.assert_close(weight.grad, torch.full_like(x, float(weight.grad[0, 0])))  # pyright: ignore


def test_of_a_function_that_is_cut(device: torch.device) -> None:
    net = nn.Linear(3, 3).to(device)

    @pygraph.jit
    def function(x: Tensor) -> Tensor:
        found = torch.distributions.Categorical(logits=net(x), validate_args=False)
        print(end="")
        loss = found.entropy().mean()
        net.zero_grad()
        loss.backward()
        return loss.detach()

    def calls() -> None:
        for _ in range(4):
            x = torch.randn(4, 3).to(device)
            loss = function(x)
            gradient = net.weight.grad.clone()  # pyright: ignore
            net.zero_grad()
            expected = torch.distributions.Categorical(logits=net(x)).entropy().mean()
            expected.backward()
            torch.testing.assert_close((loss, gradient), (expected.detach(), net.weight.grad))
        ended.append(True)

    ended: list[bool] = []
    thread = threading.Thread(target=calls, daemon=True)  # it waited for ever
    thread.start()
    thread.join(120)
    assert ended


# ---- writes of values with a graph into tensors from before ----------------------------------------------------------


def add(total: Tensor, loss: Tensor) -> None:
    total.add_(loss)


def of_a_row(total: Tensor, loss: Tensor) -> None:
    total[1:].add_(loss)


def of_an_item(total: Tensor, loss: Tensor) -> None:
    total[0] = loss


def into_and_away(total: Tensor, loss: Tensor) -> None:
    total.add_(loss)
    total.sum().backward(retain_graph=True)
    total.detach_()


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("write", [add, of_a_row, of_an_item, into_and_away])
def test_a_trace_leaves_no_graph_in_tensors_from_before(
    device: torch.device, write: Callable[[Tensor, Tensor], None], is_view: bool, is_leaf: bool
) -> None:
    """Their graph is eager's, and so are the gradients of a backward through it."""

    def play(wrap: Callable[..., Any]) -> list[Any]:
        weight = torch.ones(4, device=device, requires_grad=True)
        whole = torch.zeros(5, device=device) if is_leaf else weight.sum() * torch.ones(5, device=device)
        total = whole[1:4] if is_view else whole

        def function(x: Tensor) -> Tensor:
            loss = (weight * x).square().mean()
            write(total, loss)
            return loss.detach()

        fn, found = wrap(function), list[Any]()
        for number in range(4):
            x = torch.full((4,), 1.0 + number, device=device)
            try:
                found.append(fn(x).item())
            except RuntimeError as error:  # as a view that cannot be detached
                found.append(type(error))
            found += [total.requires_grad, total.is_leaf, depth_of(total)]
        if total.requires_grad:
            total.sum().backward()
        return [*found, total.tolist(), None if weight.grad is None else weight.grad.tolist()]

    assert play(pygraph.jit) == play(lambda function: function)


def depth_of(tensor: Tensor) -> int:
    """The nodes on the way from a tensor to the beginning of its graph."""
    depth, node = 0, tensor.grad_fn
    while node is not None:
        depth, node = depth + 1, node.next_functions[0][0] if node.next_functions else None
    return depth
