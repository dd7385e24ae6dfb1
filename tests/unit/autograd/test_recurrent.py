"""Recurrent cells, whose operations on a device are not those of the host, one of which torch does not describe."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import pygraph

CELLS: dict[str, type[nn.RNNCellBase]] = {"GRU": nn.GRUCell, "LSTM": nn.LSTMCell, "RNN": nn.RNNCell}


def make(name: str, bias: bool, device: torch.device) -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    cell = CELLS[name](3, 5, bias=bias)
    x, hidden = torch.randn(4, 3), torch.randn(4, 5)
    state: Any = (hidden, hidden.cos()) if name == "LSTM" else hidden
    return (
        cell.to(device),
        x.to(device),
        tuple(part.to(device) for part in state) if name == "LSTM" else state.to(device),
    )


def total(state: Any) -> Tensor:
    return sum((part.square().sum() for part in (state if isinstance(state, tuple) else (state,))), torch.zeros(()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_and_its_gradients_are_replayed(device: torch.device, name: str, bias: bool) -> None:
    cell, x, state = make(name, bias, device)
    jitted = copy.deepcopy(cell)
    step = pygraph.jit(jitted)
    for _ in range(3):
        loss, found = total(cell(x, state)), total(step(x, state))
        loss.backward()
        found.backward()
        assert torch.equal(found, loss)
        for expected, parameter in zip(cell.parameters(), jitted.parameters(), strict=True):
            assert parameter.grad is not None
            assert expected.grad is not None
            assert torch.equal(parameter.grad, expected.grad)
        x = x.sin()
    # torch's own description of an LSTM's cell raises without biases (checked with torch 2.11 and 2.13).
    assert bool(step.explain().to_dict()["fallbacks"]) == (name == "LSTM" and not bias)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_in_stacks(device: torch.device, name: str) -> None:
    cell, x, state = make(name, True, device)
    parameters = dict(cell.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor, state: Any) -> Tensor:
        return total(functional_call(cell, parameters, (x, state)))

    jitted = pygraph.jit(loss)
    for _ in range(2):
        torch.testing.assert_close(
            vmap(grad(jitted), (None, 0, 0))(parameters, x, state),
            vmap(grad(loss), (None, 0, 0))(parameters, x, state),
        )
        norms = [
            grad(lambda x, f=f: sum(g.square().sum() for g in grad(f)(parameters, x, state).values()))(x)
            for f in (loss, jitted)
        ]
        torch.testing.assert_close(norms[1], norms[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_that_of_the_host(device: torch.device, name: str, bias: bool) -> None:
    cell, x, state = make(name, bias, device)
    host, host_x, host_state = make(name, bias, torch.device("cpu"))
    found, expected = total(cell(x, state)), total(host(host_x, host_state))
    found.backward()
    expected.backward()
    torch.testing.assert_close(found.cpu(), expected)
    for ours, theirs in zip(cell.parameters(), host.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
