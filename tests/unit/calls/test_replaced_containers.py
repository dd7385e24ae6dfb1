"""Lists, tuples and dicts of tensors that are others at every call, in attributes and variables: inputs of a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pygraph

KINDS: dict[str, Callable[[list[Tensor]], Any]] = {
    "a list": lambda tensors: tensors,
    "a tuple": tuple,
    "a dict": lambda tensors: {"x": tensors[0], "y": tensors[1]},
    "tuples in a list": lambda tensors: [(tensors[0], tensors[1], 2.0), (tensors[1], tensors[0], 3.0)],
    "a dict with a list and a text": lambda tensors: {"name": "batch", "all": tensors},
}


class Loader:
    """What holds a batch for a trainer."""

    def __init__(self) -> None:
        self.batch: Any = None


class Trainer:
    """A trainer that is given its batch before a step."""

    def __init__(self, device: torch.device) -> None:
        self.net = nn.Linear(3, 3).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.loader = Loader()
        self.last: Any = None
        self.seen: list[Tensor] = []

    def total(self) -> Tensor:
        leaves = pytree.tree_leaves(self.loader.batch)
        numbers = [leaf for leaf in leaves if isinstance(leaf, float)]
        totals = [self.net(leaf).sum() for leaf in leaves if isinstance(leaf, Tensor)]
        return torch.stack(totals).sum() * sum(numbers, 1.0)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.total()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def infer(self) -> Tensor:
        with torch.no_grad():
            return self.total()


def _batch(device: torch.device, rows: int = 2) -> list[Tensor]:
    return [torch.randn(rows, 3, device=device) for _ in range(2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["step", "infer"])
def test_a_container_that_is_replaced_is_an_input(device: torch.device, kind: str, method: str) -> None:
    ours = Trainer(device)
    eagers = copy.deepcopy(ours)
    fast = pygraph.jit(getattr(ours, method))
    for number in range(12):
        made = KINDS[kind](_batch(device, 2 if number != 9 else 5))
        ours.loader.batch, eagers.loader.batch = made, copy.deepcopy(made)
        torch.testing.assert_close(fast(), getattr(eagers, method)())
        assert ours.loader.batch is made  # it is the caller's, and stays there
    torch.testing.assert_close(ours.net.state_dict(), eagers.net.state_dict())
    assert fast.cache_info().captures <= 3


BATCH: list[Tensor] = []


def test_variables_are_inputs_too(device: torch.device) -> None:
    held = _batch(device)

    def of_closure(x: Tensor) -> Tensor:
        return x * held[0] + held[1]

    def of_module(x: Tensor) -> Tensor:
        return x * BATCH[0] + BATCH[1]

    for fn in (of_closure, of_module):
        fast = pygraph.jit(fn)
        for _ in range(8):
            globals()["BATCH"] = held = _batch(device)
            x = torch.randn(2, 3, device=device)
            torch.testing.assert_close(fast(x), fn(x))
        assert fast.cache_info().captures <= 2


def test_other_numbers_and_texts_in_a_container_count(device: torch.device) -> None:
    trainer = Trainer(device)

    def scaled(x: Tensor) -> Tensor:
        batch = trainer.loader.batch
        return x * batch["scale"] + (batch["x"] if batch["sign"] == "+" else -batch["x"])

    fast = pygraph.jit(scaled)
    for number in range(16):
        sign = "+" if number % 3 else "-"
        trainer.loader.batch = {"x": torch.randn(3, device=device), "scale": float(number), "sign": sign}
        x = torch.randn(3, device=device)
        torch.testing.assert_close(fast(x), scaled(x))
    assert fast.cache_info().captures <= 5


def _popped(trainer: Trainer, x: Tensor) -> Tensor:
    return x + trainer.loader.batch.pop()


def _returned(trainer: Trainer, x: Tensor) -> Any:
    return x + 1, trainer.loader.batch


def _remembered(trainer: Trainer, x: Tensor) -> Tensor:
    trainer.last = trainer.loader.batch
    return x + trainer.last[0]


def _compared(trainer: Trainer, x: Tensor) -> Tensor:
    return x + 1 if trainer.loader.batch is trainer.last else x - trainer.loader.batch[0]


def _updated(trainer: Trainer, x: Tensor) -> Tensor:
    trainer.loader.batch[0].add_(x)
    return trainer.loader.batch[0] * 2


@pytest.mark.parametrize("fn", [_popped, _returned, _remembered, _compared, _updated])
def test_what_else_is_done_with_a_container_is_done(device: torch.device, fn: Callable[..., Any]) -> None:
    ours, eagers = Trainer(device), Trainer(device)
    fast = pygraph.jit(fn)
    for number in range(12):
        batch, x = _batch(device), torch.randn(2, 3, device=device)
        ours.loader.batch, eagers.loader.batch = batch, [one.clone() for one in batch]
        if fn is _compared and number % 4 == 3:
            ours.last, eagers.last = batch, eagers.loader.batch
        torch.testing.assert_close(fast(ours, x), fn(eagers, x))
        assert ours.loader.batch is batch
        torch.testing.assert_close(batch, eagers.loader.batch)
        if fn is _returned:
            assert fast(ours, x)[1] is batch
        if fn is _remembered:
            assert ours.last is batch


def test_a_list_of_parameters_is_none(device: torch.device) -> None:
    ours, eagers = Trainer(device), Trainer(device)
    eagers.net.load_state_dict(ours.net.state_dict())

    def step(trainer: Trainer, x: Tensor) -> Tensor:
        loss = trainer.net(x).square().sum()
        gradients = torch.autograd.grad(loss, trainer.loader.batch)
        with torch.no_grad():
            for one, gradient in zip(trainer.loader.batch, gradients, strict=True):
                one.sub_(gradient, alpha=0.1)
        return loss.detach()

    fast = pygraph.jit(step)
    for _ in range(8):
        for trainer in (ours, eagers):
            trainer.loader.batch = list(trainer.net.parameters())
        x = torch.randn(2, 3, device=device)
        torch.testing.assert_close(fast(ours, x), step(eagers, x))
    torch.testing.assert_close(ours.net.state_dict(), eagers.net.state_dict())
