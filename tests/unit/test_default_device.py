"""Calls where tensors are made on the accelerator by default, as scripts have it by ``torch.set_default_device``."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pygraph

FACTORIES = {"tensor", "zeros", "ones", "empty", "arange", "full", "rand", "randn", "randint", "eye", "linspace"}


@pytest.fixture(autouse=True)
def _default_device(device: torch.device) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(device)
    yield
    torch.set_default_device(None if before.type == "cpu" else before)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "number": (lambda x, k: x * k + k, lambda k: (torch.ones(3) * k, k * 0.5)),
    "tensor of a number": (lambda x, k: x * torch.tensor(k) + torch.tensor([k, 1.0])[0], lambda k: (torch.ones(3), k)),
    "list": (lambda x, ks: x[ks], lambda k: (torch.arange(5.0), [k % 5, 1, (k + 1) % 5])),
    "array": (lambda x, a: x * torch.as_tensor(a) * 2, lambda k: (torch.ones(3), np.full(3, float(k)))),
    "question": (lambda x: x * 2 if x.sum() > 3 else x - torch.zeros(3), lambda k: (torch.full((3,), float(k)),)),
    "size": (lambda x: x[x > 2].sum() + torch.arange(len(x)), lambda k: (torch.arange(5.0) + k,)),
    "host": (lambda x: x + torch.ones(3, device="cpu").sum() + float(torch.zeros(())), lambda k: (torch.ones(3) * k,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions(kind: str) -> None:
    function, arguments = FUNCTIONS[kind]
    fast = pygraph.jit(function)
    for k in range(6):
        torch.testing.assert_close(fast(*arguments(k)), function(*arguments(k)))


@pytest.mark.parametrize("kind", ["scheduled", "packed"])
def test_steps_of_training(kind: str) -> None:
    models = [nn.LSTM(3, 2) if kind == "packed" else nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in models]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]

    def step(model: nn.Module, optimizer: Any, schedule: Any, x: Tensor, lengths: Tensor) -> Tensor:
        optimizer.zero_grad()
        if kind == "packed":
            found = model(nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False))[0].data
        else:
            found = model(x)
        loss = found.square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    fast = pygraph.jit(step)
    for k in range(6):
        x, lengths = torch.ones(4, 2, 3) * k, torch.tensor([4, 1 + k % 4], device="cpu")
        losses = [
            function(*of_model, x, lengths)
            for function, of_model in zip((fast, step), zip(models, optimizers, schedules, strict=True), strict=True)
        ]
        torch.testing.assert_close(*losses)


def test_no_module_of_ours_makes_tensors_by_default() -> None:
    """What is made for the host names it."""
    found = [
        f"{path}:{call.lineno}"
        for path in pathlib.Path(pygraph.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in FACTORIES
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        if all(keyword.arg != "device" for keyword in call.keywords)
    ]
    assert not found
