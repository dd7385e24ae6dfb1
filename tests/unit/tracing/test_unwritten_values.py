"""Nodes that functionalization would leave as they are are copied, and the Program is that of a second trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from pygraph.tracing import functionalize
from pygraph.tracing.recording_interpreter import RecordingInterpreter
from pygraph.tracing.unwritten_values import AGAIN


class Never:
    """Has every node traced again."""

    def __init__(self, graph: Any, whole: Any) -> None:
        del graph, whole

    def value(self, node: Any, values: Any) -> Any:
        return AGAIN

    def make(self, nodes: Any, values: Any) -> None:
        pass


def read_before_and_after(x: Tensor, y: Tensor) -> Tensor:
    before = x * 2
    x.add_(y)
    return before + x


def write_through_a_view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    new = x @ y
    early = new.t() * 2
    new[0].mul_(y[0])
    return early, new.t() + new


def write_through_a_view_of_a_view(x: Tensor, y: Tensor) -> Tensor:
    new = x + y
    flat = new.view(-1)
    part = flat[:3]
    sums = flat.sum()
    part.zero_()
    return new * sums


def write_late(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    new = (x @ y).t().contiguous()
    out = new.relu() + new.t()
    new.fill_(1.0)
    return out, new


def write_one_of_several(x: Tensor, y: Tensor) -> Tensor:
    values, indices = (x + y).sort()
    first, second = values.split([1, 3])
    picked = indices.clone()
    first.neg_()
    return values + second.sum() + picked


def views_of_one_memory(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    new = x @ y
    return new[1:], new.t(), new[:2]


def return_what_is_given(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    new = x.detach() + y
    return x.detach(), x, x.t(), new, new.detach()


def reshape_in_place(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    new = x @ y
    alias = new.detach()
    new.t_()
    return alias * 2, new * 3


def transposed(x: Tensor, y: Tensor) -> Tensor:
    x.t().copy_(y)
    return F.layer_norm(x.t(), (4,)).softmax(1)


def normed(x: Tensor, y: Tensor) -> Tensor:
    mean, var = y[0].clone(), y[1].clone().abs()
    out = F.batch_norm(x, mean, var, training=True)
    return out + mean + var


def differentiated(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    loss = F.batch_norm(x.relu(), y[0], y[1].abs(), training=False).sum()
    return torch.autograd.grad(loss, x)


CLOSED_OVER: dict[torch.device, Tensor] = {}


def write_to_what_it_closes_over(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    state = CLOSED_OVER[x.device]
    before = state * x
    with torch.no_grad():
        state.add_(y)
        state.t_().t_()
    with torch.inference_mode():
        inside = (state + x).clone()
    return before, inside * 1, state.view(-1) * 2


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    read_before_and_after, write_through_a_view, write_through_a_view_of_a_view, write_late, write_one_of_several,
    views_of_one_memory, return_what_is_given, reshape_in_place, transposed, normed, differentiated,
    write_to_what_it_closes_over,
)  # fmt: skip


def arguments(device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4).to(device), torch.randn(4, 4).to(device)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_a_program_is_that_of_a_second_trace(
    device: torch.device, fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, expected = arguments(device), arguments(device)
    state = CLOSED_OVER[given[0].device] = torch.ones(4, 4).to(device)
    program = pygraph.trace(fn)(*given)
    results = fn(*expected)
    updated = state.clone()
    state.fill_(1.0)
    torch.testing.assert_close(program(*given), results, rtol=0, atol=0)
    torch.testing.assert_close(state, updated, rtol=0, atol=0)
    torch.testing.assert_close(given, expected, rtol=0, atol=0)
    monkeypatch.setattr(functionalize, "UnwrittenValues", Never)
    again = pygraph.trace(fn)(*given)
    # Views that functionalization makes anew stand where they are used first, which may be elsewhere.
    assert sorted(str(node.target) for node in program.nodes) == sorted(str(node.target) for node in again.nodes)
    for field in ("inputs", "outputs", "aliases", "statics"):
        assert str(getattr(program, field)) == str(getattr(again, field))


def test_an_argument_at_another_offset_is_traced_again(device: torch.device) -> None:
    rows = torch.arange(12.0).reshape(3, 4).to(device)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(2, 2), x.view(2, 2) * 2

    program = pygraph.trace(fn)(rows[1])
    for row in rows:
        torch.testing.assert_close(program(row), fn(row), rtol=0, atol=0)


def test_what_is_traced_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step, only the optimizer is, with what it updates."""
    called: list[str] = []
    original = RecordingInterpreter.call_function

    def call_function(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        called.append(target.__name__)
        return original(self, target, args, kwargs)

    monkeypatch.setattr(RecordingInterpreter, "call_function", call_function)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
    x = torch.randn(3, 4).to(device)

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for tensor, gradient in zip(net.parameters(), gradients, strict=True):
                tensor.sub_(gradient, alpha=optimizer.param_groups[0]["lr"])
        return loss.detach()

    pygraph.trace(step)(x)
    assert called == ["sub_.Tensor"] * 6
