"""What a trace cannot know of a tensor is refused also where gradients are taken outside, behind other modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph


def by_text(x: Tensor, weight: Tensor) -> Tensor:
    return x * 3 if "7777" in str(x) else torch.relu(x @ weight)


def by_format(x: Tensor, weight: Tensor) -> Tensor:
    return x * 3 if f"{x.sum():.0f}" == "77770" else torch.relu(x @ weight)


def by_offset(x: Tensor, weight: Tensor) -> Tensor:
    return x * 3 if x.storage_offset() else torch.relu(x @ weight)


@pytest.mark.parametrize("question", [by_text, by_format, by_offset])
def test_under_autograd(device: torch.device, question: Callable[..., Any]) -> None:
    """The first calls do not ask, and what is differentiated there is known when the others are traced."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return question(x, self.linear.weight) if self.training else self.linear(x)

    model = Asking().to(device)
    fast = pygraph.jit(model)
    for training in (False, True):
        model.train(training)
        for value in (1.0, 2.0, 3.0, 7777.0, 4.0, 7777.0):
            base = torch.full((10,), value, device=device)
            x = (base[5:] if value == 7777 else base[:5]).expand(2, 5).requires_grad_()
            found, expected = fast(x), model(x)
            assert torch.equal(found, expected)
            (mine,), (theirs,) = (torch.autograd.grad(result.sum(), x) for result in (found, expected))
            assert torch.equal(mine, theirs)


def test_the_text_of_a_parameter_is_that_of_each_call(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.ones(2, device=device))

    @pygraph.jit
    def texts(x: torch.Tensor) -> tuple[str, str, str]:
        with torch.no_grad():
            weight.mul_(x)
        return repr(weight), f"{[weight]}", str(weight)

    for number in range(4):
        found = texts(torch.tensor(2.0, device=device))
        assert all(f"{2.0 ** (number + 1):g}." in text for text in found)
