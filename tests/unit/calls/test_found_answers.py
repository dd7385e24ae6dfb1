"""A new way of a function that decides is traced once: the trace that finds its answers is that of calls told them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.calls.found_answers import FoundAnswers
from pygraph.calls.function import Call
from pygraph.calls.keys import flatten_call
from pygraph.errors import TraceError
from pygraph.ir.paths import ANSWERS
from pygraph.tracing.decisions import UNKNOWN_PATH, OtherPathError
from tests.steps import assert_same

pytestmark = pytest.mark.rotates


def by_outcome(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def by_three(x: Tensor) -> Tensor:
    if x.sum() > 0 and x.max().item() < 3:
        x = x * 2
    return x - 5 if (x > 1).all() else x


def by_number(x: Tensor) -> Tensor:
    return x[: int((x > 0).sum())] * 2


def without_a_question(x: Tensor) -> Tensor:
    """It asks for nothing in calls of another length."""
    return x * 3 if len(x) == 4 or x.sum() > 0 else x - 1


CASES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "outcome": (by_outcome, 1 + 2),  # one before it is known that the function decides, and one for each way
    "three": (by_three, 1 + 4),
    "number": (by_number, 2 + 2),  # one more before numbers are asked for
}


@pytest.mark.parametrize("name", CASES)
def test_a_way_is_traced_once(device: torch.device, traces: list[str], name: str) -> None:
    fn, most = CASES[name]
    fast = pygraph.jit(fn)
    for value in (1.0, 1.0, -1.0, 1.0, -1.0, 2.0, 5.0, -1.0):
        x = torch.tensor([value, 1.0, 1.0, value], device=device)
        assert torch.equal(fast(x.clone()), fn(x)), value
    assert len(traces) <= most, traces


def test_a_call_that_asks_for_nothing(device: torch.device) -> None:
    fast = pygraph.jit(without_a_question)
    for length in (3, 4, 3, 4):
        for value in (1.0, -1.0):
            x = torch.full((length,), value, device=device)
            assert torch.equal(fast(x.clone()), without_a_question(x)), (length, value)


class Counter:
    """What a step leaves behind."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.skipped = self.steps = 0
        self.best = float("inf")

    def step(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean() * scale
        loss.backward()
        self.steps += 1
        if not torch.isfinite(loss):
            self.skipped += 1
            return loss.detach()
        if self.steps % 3 == 0 and loss.item() < self.best:
            self.best = loss.item()
        self.optimizer.step()
        return loss.detach()

    def left(self) -> Any:
        return copy.deepcopy(self.net.state_dict()), self.skipped, self.steps, self.best


@pytest.mark.parametrize("scales", [[1.0] * 12, [1.0, 2.0, 0.5] * 4])
def test_ways_of_a_step_that_leaves_numbers_behind(device: torch.device, scales: list[float]) -> None:
    found: list[Any] = []
    for jitted in (False, True):
        counter = Counter(device)
        step = pygraph.jit(counter.step) if jitted else counter.step
        results: list[Any] = []
        for number, scale in enumerate(scales):
            x = torch.full((4, 3), float("nan") if number in (5, 8) else 1.0 + number % 2, device=device)
            results.append((step(x, scale), counter.left()))
        found.append(results)
    assert_same(found[1], found[0], device)


def test_ways_under_autograd(device: torch.device, traces: list[str]) -> None:
    fast = pygraph.jit(by_outcome)
    for value in (1.0, -1.0, 1.0, -1.0):
        x = torch.full((4,), value, device=device, requires_grad=True)
        result = fast(x * 2)
        assert torch.equal(result, by_outcome(x * 2))
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 4
    assert traces


def call_of(answers: tuple[str, ...], *args: Any) -> Call:
    """A call with these answers."""
    kwargs = {ANSWERS: answers}
    return Call(args, kwargs, *flatten_call(args, kwargs))


def test_only_the_same_call_is_served(device: torch.device) -> None:
    x, failed = torch.zeros(2, device=device), TraceError("it fails")
    others = {
        "another tensor": (by_outcome, call_of(("True",), x.clone(), 2.0)),
        "another number": (by_outcome, call_of(("True",), x, -2.0)),
        "another class of number": (by_outcome, call_of(("True",), x, 2)),
        "other answers": (by_outcome, call_of(("True", "False"), x, 2.0)),
        "another function": (by_three, call_of(("True",), x, 2.0)),
    }
    found = FoundAnswers()
    found.path = ("True",)
    with pytest.raises(OtherPathError) as raised:
        found.keep(by_outcome, call_of(UNKNOWN_PATH, x, 2.0), failed)
    assert raised.value.path == ("True",)
    for name, (fn, call) in others.items():
        assert found.take(fn, call, frozenset()) is None, name
    assert found.take(by_outcome, call_of(("True",), x, 2.0), frozenset()) is failed
    assert found.take(by_outcome, call_of(("True",), x, 2.0), frozenset()) is None
    found.keep(by_outcome, call_of(("True",), x, 2.0), failed)  # it was told its answers


def test_what_lies_behind_the_answers_keeps_its_positions(device: torch.device) -> None:
    """Of a function that takes state: what it asks of numbers comes behind the arguments of the user's function."""
    x, failed = torch.zeros(2, device=device), TraceError("it fails")

    def call(*answers: str) -> Call:
        args = ([], [], [], [], (x,), {ANSWERS: answers}, [0.5])
        return Call(args, {}, *flatten_call(args, {}))

    for answers, is_served in ((("True",), True), (("True", "True"), False)):
        found = FoundAnswers()
        found.path = answers
        with pytest.raises(OtherPathError):
            found.keep(by_outcome, call(*UNKNOWN_PATH), failed)
        assert (found.take(by_outcome, call(*answers), frozenset()) is failed) is is_served
