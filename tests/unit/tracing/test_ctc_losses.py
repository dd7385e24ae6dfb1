"""The CTC loss: it runs between graphs, and costs a step no more than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from tests.steps import assert_same

LENGTHS: dict[str, Callable[[Tensor], Any]] = {
    "on the host": lambda lengths: lengths,
    "on the device": lambda lengths: lengths,
    "numbers": lambda lengths: tuple(lengths.tolist()),
    "short integers": lambda lengths: lengths.int(),
}


def train(device: torch.device, run: Callable[..., Any], kind: str, **options: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    net = nn.Linear(5, 7).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: Tensor, targets: Tensor, inputs: Any, labels: Any) -> Tensor:
        loss = F.ctc_loss(net(x).log_softmax(-1), targets, inputs, labels, **options)
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        return loss.detach()

    call, found = run(step), list[Any]()
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(10, 3, 5, generator=generator).to(device)
        targets = torch.randint(1, 7, (3, 5), generator=generator)
        inputs, labels = torch.tensor([10, 9, 10 - number % 2]), torch.tensor([4, 3, 2 + number % 3])
        if options.get("zero_infinity"):
            inputs = inputs - 7  # less than there are labels
        if kind == "on the device":
            inputs, labels = inputs.to(device), labels.to(device)
        taken = LENGTHS[kind](inputs), LENGTHS[kind](labels)
        if number == 5:  # of another shape, one after the other
            targets = torch.cat([row[:length] for row, length in zip(targets, labels.tolist(), strict=True)])
        found.append((call(x, targets.to(device), *taken), [one.detach().clone() for one in net.parameters()]))
    return found, call


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "zero_infinity": True}, {"reduction": "none"}], ids=str)
def test_training(device: torch.device, kind: str, options: dict[str, Any]) -> None:
    mine, fast = train(device, pygraph.jit, kind, **options)
    assert_same(mine, train(device, lambda fn: fn, kind, **options)[0], device)
    reasons = [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]
    assert not any("the shape of what" in one or "two devices" in one for one in reasons)
    assert fast.cache_info().hits >= 2


def test_a_loss_alone(device: torch.device) -> None:
    criterion = nn.CTCLoss(reduction="mean")
    fast = pygraph.jit(criterion)
    for number in range(4):
        probabilities = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(number)).log_softmax(-1).to(device)
        arguments = probabilities, torch.tensor([[1, 2, 1], [3, 1, 2]]).to(device), (8, 8), (3, 1 + number % 3)
        assert_same(fast(*arguments), criterion(*arguments), device)
