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
from tests.extent import examples, third

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


@pytest.mark.parametrize("name", dict.fromkeys(["Adam", *third(sorted(OPTIMIZERS))]))
def test_several_steps_of_an_optimizer_in_one_call(device: torch.device, name: str) -> None:
    torch.manual_seed(0)
    start = nn.Linear(3, 2)
    data = [torch.randn(5, 3) for _ in range(4)]
    found: list[Any] = []
    for is_fast in (False, True):
        model = copy.deepcopy(start).to(device)
        optimizer = OPTIMIZERS[name](model.parameters())

        def epoch(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            loss = torch.zeros((), device=x.device)
            for _ in range(2):
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


CONSTANTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda made, other: made.add_(other),
    "its view": lambda made, other: made.view(1).add_(other),
    "detached": lambda made, other: made.detach().add_(other),
    "copy_": lambda made, other: made.copy_(other),
    "out=": lambda made, other: torch.add(other.view_as(made), 1, out=made),
    "of several": lambda made, other: torch._foreach_add_([made, other], 1.0),
    "of one": lambda made, other: torch._foreach_add_([made], 1.0),
    "of several, a view": lambda made, other: torch._foreach_mul_([other, made.view(1)], 3.0),
    "copied from a list": lambda made, other: torch._foreach_copy_([made], [other]),
    "by the host": lambda made, other: made.fill_(7.0),
}


@pytest.mark.parametrize("write", CONSTANTS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_constant_that_is_updated(device: torch.device, write: str, shape: tuple[int, ...]) -> None:
    """A tensor of a number that the function makes itself, updated alone or beside others, by itself or by a view."""

    def function(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.tensor(2.0).reshape(shape) if shape else torch.tensor(2.0)
        view = made.detach()
        CONSTANTS[write](made, other)
        return x * made.item(), x + view.item()

    found: list[Any] = []
    fast = pygraph.jit(function)
    for call in (function, fast):
        other = torch.tensor(4.0)
        found.append([call(torch.ones(2, device=device), other) for _ in range(3)])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["Adam", "Adam, one by one"])
def test_parameters_that_take_part_later(device: torch.device, name: str) -> None:
    """Their state begins in a step in which others have theirs."""
    torch.manual_seed(0)
    start = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    data = [torch.randn(5, 3) for _ in range(9)]
    found: list[Any] = []
    fast: Any = None
    for is_fast in (False, True):
        first, second = models = copy.deepcopy(start).to(device)
        optimizer = OPTIMIZERS[name](models.parameters())

        def step(
            x: Tensor,
            both: bool,
            first: nn.Module = first,
            second: nn.Module = second,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> Tensor:
            optimizer.zero_grad()
            loss = first(x).square().mean()
            if both:
                loss = loss + second(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run: Any = step
        if is_fast:
            run = fast = pygraph.jit(step)
        losses = [run(x.to(device), count > 3) for count, x in enumerate(data)]
        found.append((losses, models.state_dict()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert fast.explain().counted_fallbacks() == {}
    assert fast.explain().in_python == ()
