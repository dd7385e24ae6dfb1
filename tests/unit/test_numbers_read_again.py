"""Numbers that a function reads from a tensor again after an update: each is that of its moment, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pygraph
from tests.extent import examples

Optimizers = dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]]

OPTIMIZERS: Optimizers = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "Adam, one by one": lambda params: torch.optim.Adam(params, lr=0.1, foreach=False),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "Adam on the device": lambda params: torch.optim.Adam(params, lr=0.1, capturable=True),
    "fused Adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1, t0=3),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_steps_of_an_optimizer_in_one_call(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    start = nn.Linear(3, 2)
    data = [torch.randn(5, 3) for _ in range(6)]
    found: list[Any] = []
    for is_fast in (False, True):
        model = copy.deepcopy(start).to(device)
        optimizer = OPTIMIZERS[name](model.parameters())

        def epoch(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            loss = torch.zeros((), device=x.device)
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            return loss.detach()

        step = pygraph.jit(epoch) if is_fast else epoch
        losses = [step(x.to(device)) for x in data]
        found.append((losses, model.state_dict(), optimizer.state_dict()["state"]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "a view": lambda t: t.view(-1)[0].mul_(2),
    "an item": lambda t: t.__setitem__(..., t + 3),
    "of several": lambda t: torch._foreach_add_([t], 2),
    "out=": lambda t: torch.add(t, 5, out=t),
    "nothing": lambda t: t + 1,
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.item(),
    "float": float,
    "a view": lambda t: t.view(-1)[0].item(),
    "detached": lambda t: t.detach().item(),
}
HELD = ("closed over", "argument", "on the CPU", "two arguments")


@settings(max_examples=examples(20, 150), deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(WRITES)), st.sampled_from(sorted(READS))), min_size=1, max_size=5),
    held=st.sampled_from(HELD),
)
def test_reads_between_writes(device: torch.device, steps: list[tuple[str, str]], held: str) -> None:
    """Of a closed-over tensor, an argument, one on the CPU, and of another view of the memory that is written."""
    found: list[Any] = []
    for is_fast in (False, True):
        state = torch.full((1,), 5.0, device="cpu" if held == "on the CPU" else device)
        view = state.view(1, 1)

        def function(x: Tensor, *given: Tensor, state: Tensor = state) -> list[Tensor]:
            written = given[0] if given else state
            read = given[-1] if given else state
            results: list[Tensor] = []
            for write, how in steps:
                WRITES[write](written)
                results.append(x * READS[how](read))
            return results

        given_tensors = {"argument": (state,), "two arguments": (state, view)}.get(held, ())
        fast = pygraph.jit(function) if is_fast else function
        x = torch.ones(2, device=device)
        found.append([[one.clone() for one in fast(x, *given_tensors)] for _ in range(3)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_condition_that_is_toggled_between_two_questions(device: torch.device) -> None:
    flag = torch.tensor(True, device=device)

    def function(x: Tensor) -> Tensor:
        if flag:
            x = x + 1
        flag.logical_not_()
        return x * 10 if flag else x

    expected = [2.0, 10.0, 2.0, 10.0, 2.0]
    fast = pygraph.jit(function)
    assert [fast(torch.ones(1, device=device)).item() for _ in range(5)] == expected
