"""Numbers that are computed of what calls leave behind: step counters, schedules, corrections of optimizers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pygraph


class Adam:
    """Adam as it is written by hand, with corrections of the first steps."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.t = parameters, 0
        self.means = [torch.zeros_like(one) for one in parameters]
        self.squares = [torch.zeros_like(one) for one in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters."""
        self.t += 1
        for parameter, mean, square in zip(self.parameters, self.means, self.squares, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            mean.mul_(0.9).add_(gradient, alpha=0.1)
            square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            rate = 0.01 * math.sqrt(1 - 0.999**self.t)
            parameter.sub_(rate * (mean / (1 - 0.9**self.t)) / (square.sqrt() + 1e-8))


class OfEach(torch.optim.Optimizer):
    """Adam with a counter for each parameter, which rectifies the first steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameters that have gradients."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
            state["step"] += 1
            t = state["step"]
            state["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
            state["square"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            rate = 0.01 / (1 - 0.9**t)
            length = 1999 - 2 * t * 0.999**t / (1 - 0.999**t)
            if length > 4:
                rate *= math.sqrt((length - 4) * (length - 2) * 1999 / (1995 * 1997 * length)) * math.sqrt(1 - 0.999**t)
                parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-rate)
            else:
                parameter.add_(state["mean"], alpha=-rate)


class Noam:
    """The learning rate of the Transformer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.number = optimizer, 0

    def step(self) -> None:
        """Set the learning rate, and update the parameters."""
        self.number += 1
        rate = 16**-0.5 * min(self.number**-0.5, self.number * 4**-1.5)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


class Annealed(nn.Module):
    """A softmax whose temperature sinks at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        """The softmax."""
        temperature = max(0.5, math.exp(-0.05 * self.calls))
        self.calls += 1
        return torch.softmax(self.layer(x) / temperature, -1)


@dataclasses.dataclass
class Schedule:
    """A step and its rate."""

    step: int = 0
    rate: float = 0.1


Step = Callable[..., Any]


def by_hand(device: torch.device) -> tuple[Step, Any]:
    layer = nn.Linear(4, 4).to(device)
    optimizer = Adam(list(layer.parameters()))

    def step(x: Tensor) -> Tensor:
        layer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda: (list(layer.parameters()), optimizer.means, optimizer.t)


def of_each(device: torch.device) -> tuple[Step, Any]:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).to(device)
    optimizer = OfEach(layers.parameters())

    def step(x: Tensor, first: int = 0) -> Tensor:
        optimizer.zero_grad()
        loss = layers[first:](x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda: (list(layers.parameters()), [optimizer.state[one] for one in layers.parameters()])


def noam(device: torch.device) -> tuple[Step, Any]:
    layer = nn.Linear(4, 4).to(device)
    schedule = Noam(torch.optim.Adam(layer.parameters()))

    def step(x: Tensor) -> Tensor:
        schedule.optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        schedule.step()
        return loss.detach()

    return step, lambda: (list(layer.parameters()), schedule.number, schedule.optimizer.param_groups[0]["lr"])


def annealed(device: torch.device) -> tuple[Step, Any]:
    module = Annealed().to(device)
    return module, lambda: module.calls


def loss_of_a_mixture(device: torch.device) -> tuple[Step, Any]:
    module, state = nn.Linear(4, 8).to(device), {"step": 0}

    def loss(x: Tensor) -> Tensor:
        mean, deviation = module(x).chunk(2, -1)
        weight = min(1.0, state["step"] / 5)
        state["step"] += 1
        return x.square().mean() + weight * (mean**2 + deviation.exp() - deviation).mean()

    return loss, lambda: state["step"]


def of_a_dataclass(device: torch.device) -> tuple[Step, Any]:
    schedule = Schedule()

    def step(x: Tensor) -> Tensor:
        schedule.step += 1
        schedule.rate = 0.1 / math.sqrt(schedule.step)
        return x * schedule.rate

    return step, lambda: schedule


def of_a_variable(device: torch.device) -> tuple[Step, Any]:
    number = 0

    def step(x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return x * (0.5 * (1 + math.cos(math.pi * number / 100)))

    return step, lambda: number


def with_arguments(device: torch.device) -> tuple[Step, Any]:
    state = Schedule(3)

    def step(x: Tensor, first: int = 2, second: int = 5) -> Tensor:
        state.step += 2
        return x * math.sqrt(state.step) + math.log(first + state.step) - math.exp(-second)

    return step, lambda: state


def of_several_kinds(device: torch.device) -> tuple[Step, Any]:
    """What is stored has one structure or the other."""
    state: dict[str, Any] = {"numbers": [1, 2]}

    def step(x: Tensor) -> Tensor:
        numbers = state["numbers"]
        y = x * math.sqrt(numbers[-1]) + math.exp(-numbers[0])
        state["numbers"] = [numbers[0] + 1, *numbers[1:], numbers[-1] + 3][: 2 + numbers[0] % 2]
        return y

    return step, lambda: state


@pytest.mark.parametrize(
    "make", [by_hand, of_each, noam, annealed, loss_of_a_mixture, of_a_dataclass, of_a_variable, of_several_kinds]
)
def test_numbers_of_state_are_computed_before_the_call(device: torch.device, make: Any) -> None:
    check(make, device, [() for _ in range(20)])


def test_counters_of_parameters_that_are_equal_no_more(device: torch.device) -> None:
    """A step leaves the first layer out: its counters have other values from then on."""
    check(of_each, device, [(0,)] * 6 + [(1,)] + [(0,)] * 12, skipped=1)


def test_numbers_of_state_and_of_arguments(device: torch.device) -> None:
    """Each has a name of its own, whatever position it has."""
    check(with_arguments, device, [(number, number % 7 + 1) for number in range(20)])


def test_numbers_of_arguments_that_come_first(device: torch.device) -> None:
    """State changes once its numbers are computed, and the other way round."""
    calls = [(number, 5) for number in range(6)] + [(6, number) for number in range(6)]
    check(with_arguments, device, [*calls, *((number, number) for number in range(6))])


def test_numbers_inside_of_objects(device: torch.device) -> None:
    """A dataclass is passed, and changed, and holds what the rate is computed of."""

    def step(x: Tensor, schedule: Schedule, first: dict[str, Any]) -> Tensor:
        schedule.step += 1
        schedule.rate = 0.1 / math.sqrt(schedule.step + first["number"])
        return x * schedule.rate

    mine, theirs = Schedule(), Schedule()
    fast = pygraph.jit(step)
    for number in range(20):
        x = torch.full((3, 4), number / 7, device=device)
        assert_same(fast(x, mine, {"number": number}), step(x, theirs, {"number": number}))
        assert mine == theirs
    assert fast.cache_info().captures <= 4


def check(make: Any, device: torch.device, calls: list[tuple[Any, ...]], skipped: int = 0) -> None:
    """Compare calls and what they leave behind with eager, and expect few traces."""
    torch.manual_seed(0)
    function, state = make(device)
    torch.manual_seed(0)
    slow, slow_state = make(device)
    fast = pygraph.jit(function)
    for number, numbers in enumerate(calls):
        x = torch.full((3, 4), number / 7, device=device)
        assert_same((fast(x, *numbers), state()), (slow(x, *numbers), slow_state()))
    info, report = fast.cache_info(), fast.explain().to_dict()
    assert sum(one["count"] for one in report["fallbacks"]) <= skipped, report["fallbacks"]
    assert info.captures <= 8, info


def assert_same(found: Any, expected: Any) -> None:
    """Compare tensors, numbers and objects that hold some."""
    if dataclasses.is_dataclass(expected):
        found, expected = vars(found), vars(expected)
    mine, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert repr(one) == repr(other)


class Counting:
    """Something that counts its calls, and does by that number what it is told."""

    def __init__(self, do: Callable[[Counting, Tensor], Any], device: torch.device) -> None:
        self.do, self.step, self.chosen = do, 0, 0
        self.weights = [torch.full((2,), float(k + 1), device=device) for k in range(3)]
        self.ring: list[Any] = [None] * 3

    def __call__(self, x: Tensor) -> Any:
        result = self.do(self, x)
        self.step += 1
        return result


def _store(one: Counting, x: Tensor) -> Tensor:
    one.ring[one.step % 3] = x * 2
    return x + 1


def _note(one: Counting, x: Tensor) -> Tensor:
    one.chosen = [10, 20, 30][one.step % 3]
    return x + one.chosen


@pytest.mark.parametrize(
    "do",
    [
        lambda one, x: one.weights[one.step % 3] * x,
        lambda one, x: one.weights[int(one.step / 3) % 3] * x,
        lambda one, x: x[: one.step // 3] + 1,
        lambda one, x: x.repeat(one.step // 4),
        lambda one, x: sum([x * 2 for _ in range(one.step // 3)], x),
        lambda one, x: x * "abc".index("abc"[one.step % 3]),
        _store,
        _note,
    ],
)
def test_an_index_of_zero_or_one_is_no_outcome(device: torch.device, do: Callable[[Counting, Tensor], Any]) -> None:
    """To Python, 1 is ``True``: what is good for an index of 1 is not for one of 2."""
    expected, found = Counting(do, device), Counting(do, device)
    fast = pygraph.jit(found)
    for value in range(13):
        x = torch.full((2,), value + 1.0, device=device)
        torch.testing.assert_close(fast(x), expected(x))
        assert (found.step, found.chosen) == (expected.step, expected.chosen)
        for one, other in zip(found.ring, expected.ring, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)
