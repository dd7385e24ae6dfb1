"""A step whose optimizer has its state is traced as a step at once; what only looks like one is traced as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from pygraph.errors import FallbackError
from tests.steps import step_of, traced_kinds
from tests.unit.calls.test_first_step import batches, make_net


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of functions that were traced."""
    return traced_kinds(monkeypatch)


class Trainer:
    """A net with an optimizer that has its state."""

    def __init__(self, device: torch.device) -> None:
        self.net = make_net(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), capturable=True)
        self.steps = 0
        self.last: Tensor | None = None
        self.train(*batches(device, 1)[0])

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        """A step as in every tutorial."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def cleared(self, x: Tensor, y: Tensor) -> Tensor:
        """A step that leaves no gradients behind."""
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def counted(self, x: Tensor, y: Tensor) -> Tensor:
        """A step that counts itself."""
        self.steps += 1
        return self.train(x, y)

    def noted(self, x: Tensor, y: Tensor) -> Tensor:
        """A step that changes an attribute besides."""
        self.last = self.train(x, y)
        return self.last

    def losses(self, x: Tensor, y: Tensor, training: bool = False) -> Tensor:
        """A function whose callers differentiate it, unless it is asked to."""
        loss = F.cross_entropy(self.net(x), y)
        if training:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach()
        return loss

    def seen(self, x: Tensor, y: Tensor, training: bool = False) -> Tensor:
        """A function without gradients, unless it is asked to."""
        if training:
            return self.train(x, y)
        with torch.no_grad():
            return F.cross_entropy(self.net(x), y)


def check(device: torch.device, name: str, count: int = 5, **options: Any) -> tuple[Any, Trainer]:
    """Compare calls of a method with those in eager; the compiled function and its trainer."""
    slow, quick = Trainer(device), Trainer(device)
    fast = pygraph.jit(getattr(quick, name), **options)
    for batch in batches(device, count):
        torch.testing.assert_close(fast(*batch), getattr(slow, name)(*batch), rtol=0, atol=0)
    for got, expected in zip(quick.net.parameters(), slow.net.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert (got.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            torch.testing.assert_close(got.grad, expected.grad, rtol=0, atol=0)
    assert quick.steps == slow.steps
    return fast, quick


@pytest.mark.parametrize("options", [{}, {"strict": True}])
def test_a_step_takes_one_trace(device: torch.device, traced: list[str], options: dict[str, Any]) -> None:
    fast, _ = check(device, "train", **options)
    assert traced == ["StatefulFunction"]
    assert fast.explain().to_dict()["fallbacks"] == []
    assert fast.cache_info().captures == 1


def test_a_step_that_ends_without_gradients(device: torch.device, traced: list[str]) -> None:
    fast, trainer = check(device, "cleared")
    assert set(traced) == {"StatefulFunction"}  # with gradients of before, and without
    before = len(traced)
    fast = pygraph.jit(trainer.cleared)
    for batch in batches(device, 3):
        fast(*batch)
    assert traced[before:] == ["StatefulFunction"]


def test_a_step_that_changes_more(device: torch.device, traced: list[str]) -> None:
    fast, _ = check(device, "noted")
    # The first two calls may be unlike all others, and run as they are; the third finds what is to be passed.
    assert traced == ["StatefulFunction"] * 4
    assert fast.explain().to_dict()["fallbacks"] == []


def test_a_step_that_counts(device: torch.device, traced: list[str]) -> None:
    """A number that becomes another one is no memo of a first call: the first one finds that it is to be passed."""
    fast, _ = check(device, "counted")
    assert traced == ["StatefulFunction"] * 2
    assert fast.explain().to_dict()["fallbacks"] == []


def test_why_a_first_call_runs_as_it_is(device: torch.device) -> None:
    trainer = Trainer(device)
    fast = pygraph.jit(trainer.noted)
    fast(*batches(device, 1)[0])
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert "it changes" in fallback["reason"]
    assert "last" in fallback["reason"]


@pytest.mark.parametrize("name", ["losses", "seen"])
def test_what_only_could_be_a_step(device: torch.device, traced: list[str], name: str) -> None:
    slow, quick = Trainer(device), Trainer(device)
    fast = pygraph.jit(getattr(quick, name))
    for batch in batches(device, 4):
        found = [call(*batch) for call in (fast, getattr(slow, name))]
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
        assert found[0].requires_grad == found[1].requires_grad
        if found[0].requires_grad:
            gradients = [torch.autograd.grad(loss, list(t.net.parameters()))
                         for loss, t in zip(found, (quick, slow), strict=True)]  # fmt: skip
            torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert traced.count("StatefulFunction") == 1  # in vain
    report = fast.explain().to_dict()
    # Kernels of losses on CUDA take a tensor that they do not read.
    assert [note for note in report["fallbacks"] if "no pointer to it was found" not in note["reason"]] == []
    for batch in batches(device, 3):  # and it is one now
        torch.testing.assert_close(fast(*batch, training=True), getattr(slow, name)(*batch, training=True))


def test_gradients_that_are_added_to(device: torch.device) -> None:
    """They stay the same tensors: no gradient is set."""
    results: list[list[Tensor]] = []
    for jitted in (False, True):
        trainer = Trainer(device)

        def step(x: Tensor, y: Tensor, trainer: Trainer = trainer) -> Tensor:
            trainer.optimizer.zero_grad(set_to_none=False)
            loss = F.cross_entropy(trainer.net(x), y)
            loss.backward()
            trainer.optimizer.step()
            return loss.detach()

        before = [p.grad for p in trainer.net.parameters()]
        run: Callable[..., Tensor] = pygraph.jit(step) if jitted else step
        results.append([run(*batch) for batch in batches(device, 4)])
        assert all(p.grad is grad for p, grad in zip(trainer.net.parameters(), before, strict=True))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_strict_says_what_it_cannot_trace(device: torch.device) -> None:
    trainer = Trainer(device)

    def step(x: Tensor, y: Tensor) -> float:
        return trainer.train(x, y).item()

    with pytest.raises(FallbackError):
        pygraph.jit(step, strict=True)(*batches(device, 1)[0])


def test_a_step_that_raises(device: torch.device) -> None:
    net = make_net(device)
    inner = step_of(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    (batch,) = batches(device, 1)
    inner(*batch)

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fails = inner, True

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = self.inner(x, y)
            if self.fails:
                raise ValueError("too late")
            return loss

    module = Late()
    fast = pygraph.jit(module)
    with pytest.raises(ValueError, match="too late"):
        fast(*batch)
    module.fails = False
    assert fast(*batch).isfinite()
    assert fast(*batch).isfinite()
