"""Objects without tensors of which each call is passed another one: calls with them are of one kind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph

CALLS = 8


class Smoothed(nn.Module):
    """A criterion of a user's, with another one inside and a count."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.inner = nn.KLDivLoss(reduction="sum")
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x.log_softmax(-1), y.softmax(-1)) * self.scale


class Counting(Smoothed):
    """One that counts."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, y) * self.calls


class Meter:
    """An object that a loop makes anew."""

    def __init__(self) -> None:
        self.count, self.factor = 0, 2.0


def apply(criterion: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return criterion(x, y) * 2


def update(criterion: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> float:
    loss = criterion(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def evaluate(x: Tensor, y: Tensor) -> float:
    criterion, total = nn.MSELoss(), 0.0
    for row, other in zip(x, y, strict=True):
        total += criterion(row, other).item()
    print(f"{total:.2f}")
    return total


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "of torch": lambda: nn.SmoothL1Loss(beta=0.5),
    "of the user": Smoothed,
    "with state": Counting,
    "in eval mode": lambda: nn.MSELoss().eval(),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("grad", [True, False])
def test_modules_without_tensors_are_one_kind_of_call(device: torch.device, maker: str, grad: bool) -> None:
    x, fast = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_(grad), pygraph.jit(apply)
    for k in range(CALLS):
        y = torch.full((3, 4), 0.1 * k, device=device)
        one, other = MAKERS[maker](), MAKERS[maker]()
        torch.testing.assert_close(fast(one, x, y), apply(other, x, y))
        assert getattr(one, "calls", None) == getattr(other, "calls", None)
        gc.collect()  # what calls were compiled for is not needed any more
    if maker != "with state":
        assert len(fast.explain_misses().splitlines()) <= 6
        assert fast.cache_info().captures <= 3


def test_other_settings_are_another_kind(device: torch.device) -> None:
    x, y, fast = torch.ones(4, device=device), torch.linspace(0, 2, 4, device=device), pygraph.jit(apply)
    for k in range(3 * CALLS):
        one = Smoothed(float(k % 3))
        one.inner.reduction = ("sum", "batchmean")[k % 2]
        torch.testing.assert_close(fast(one, x, y), apply(one, x, y))
        one.scale = 5.0  # of the same object
        torch.testing.assert_close(fast(one, x, y), apply(one, x, y))
        one.inner.log_target = True
        torch.testing.assert_close(fast(one, x, y), apply(one, x, y))


def test_hooks_of_a_new_module_are_called(device: torch.device) -> None:
    x, y, fast, called = torch.ones(4, device=device), torch.zeros(4, device=device), pygraph.jit(apply), list[int]()
    for k in range(CALLS):
        one = nn.MSELoss()
        if k % 2:
            one.register_forward_hook(lambda *_, k=k: called.append(k) or torch.full((), float(k), device=device))
        torch.testing.assert_close(fast(one, x, y), torch.full((), 2.0 * (k if k % 2 else 1), device=device))
    assert called == [1, 3, 5, 7]


def test_modules_that_a_function_knows_are_told_apart(device: torch.device) -> None:
    known = [nn.MSELoss(), nn.MSELoss()]
    weights = {known[0]: 1.0, known[1]: 3.0}

    def weighted(criterion: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return criterion(x, y) * weights.get(criterion, 7.0)

    def named(criterion: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return criterion(x, y) * (2 if criterion is known[0] else 5)

    x, y = torch.ones(4, device=device), torch.zeros(4, device=device)
    for function in (weighted, named):
        fast = pygraph.jit(function)
        for one in [known[0], nn.MSELoss(), nn.MSELoss(), known[1], known[0], nn.MSELoss(), known[1]]:
            torch.testing.assert_close(fast(one, x, y), function(one, x, y))


def test_modules_with_parameters_are_told_by_their_identity(device: torch.device) -> None:
    x, fast = torch.ones(4, device=device), pygraph.jit(lambda m, x: m(x))
    for k in range(CALLS):
        one = nn.Linear(4, 2).to(device)
        torch.testing.assert_close(fast(one, x + k), one(x + k))


def test_steps_with_a_new_criterion_are_one_graph(device: torch.device) -> None:
    models = [nn.Linear(3, 2).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in models]
    fast = pygraph.jit(lambda c, m, x, y, o: update(c, m(x), y, o))
    for k in range(CALLS):
        x, y = torch.full((4, 3), 0.1 * k, device=device), torch.ones(4, 2, device=device)
        found = fast(nn.MSELoss(), models[0], x, y, optimizers[0])
        assert found == pytest.approx(update(nn.MSELoss(), models[1](x), y, optimizers[1]))
    torch.testing.assert_close(models[0].weight, models[1].weight)
    assert len(fast.explain_misses().splitlines()) <= 6


def test_a_criterion_that_a_cut_function_makes_is_no_new_kind(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = pygraph.jit(evaluate)
    for k in range(CALLS):
        x, y = torch.full((3, 4), 0.1 * k, device=device), torch.ones(3, 4, device=device)
        assert fast(x, y) == pytest.approx(evaluate(x, y))
    outputs = capsys.readouterr().out.splitlines()
    assert outputs[::2] == outputs[1::2]
    assert len(fast.explain_misses().splitlines()) <= 8


def test_objects_that_are_only_read_are_taken_apart(device: torch.device) -> None:
    def scale(x: Tensor, meter: Meter, counts: bool) -> Tensor:
        if counts:
            meter.count += 1
        return x * meter.factor

    fast, x = pygraph.jit(scale), torch.ones(4, device=device)
    made: list[Any] = []
    for k in range(CALLS):
        meter = Meter()
        meter.factor = float(k)
        made.append(meter)
        torch.testing.assert_close(fast(x, meter, False), x * k)
    assert fast.cache_info().captures <= 2
    for k in range(4):
        torch.testing.assert_close(fast(x, made[k], True), x * k)
        assert made[k].count == 1
