"""The first call of a training step runs as it is, and one trace is all that follows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from pygraph.errors import FallbackError
from tests.steps import step_of, traced_kinds

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, capturable=True),
}


def make_net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)


def batches(device: torch.device, count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(5, 4).to(device), torch.randint(0, 2, (5,)).to(device)) for _ in range(count)]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of functions that were traced."""
    return traced_kinds(monkeypatch)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_takes_one_trace(device: torch.device, name: str, traced: list[str]) -> None:
    nets = [make_net(device) for _ in range(2)]
    slow, plain = (step_of(net, OPTIMIZERS[name](net.parameters())) for net in nets)
    fast = pygraph.jit(plain)
    for number, batch in enumerate(batches(device, 6)):
        torch.testing.assert_close(fast(*batch), slow(*batch), rtol=0, atol=0)
        reasons = [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]
        assert reasons == (["it is the first step of its optimizer, which makes its state"] if number == 0 else [])
    for got, expected in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert traced == ["StatefulFunction"]
    assert fast.cache_info().captures == 1


def test_a_module_that_holds_an_optimizer_is_no_step(device: torch.device) -> None:
    """Its caller trains it: the forward is a function like others, which is differentiated from outside."""

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net(device)
            self.optimizer = torch.optim.AdamW(self.net.parameters())

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model, reference = Trained(), Trained()
    fast = pygraph.jit(model)
    for x, y in batches(device, 6):
        losses: list[Tensor] = []
        for call, one in ((fast, model), (reference, reference)):
            one.optimizer.zero_grad()
            loss = F.cross_entropy(call(x), y)
            loss.backward()
            one.optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
    assert fast.explain().to_dict()["fallbacks"] == []
    assert fast.cache_info().captures


def test_a_first_step_that_raises(device: torch.device) -> None:
    nets = [make_net(device) for _ in range(2)]
    results: list[list[Tensor]] = []
    for jitted, net in zip((True, False), nets, strict=True):
        inner, fails = step_of(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)), [True]

        def step(x: Tensor, y: Tensor, inner: Any = inner, fails: list[bool] = fails) -> Tensor:
            if fails[0]:
                raise ValueError("too early")
            return inner(x, y)

        run = pygraph.jit(step) if jitted else step
        with pytest.raises(ValueError, match="too early"):
            run(*batches(device, 1)[0])
        fails[0] = False
        results.append([run(*batch) for batch in batches(device, 6)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_strict_allows_a_call_that_makes_state_as_explain_has_no_fallback(device: torch.device, name: str) -> None:
    nets = [make_net(device) for _ in range(2)]
    slow, plain = (step_of(net, OPTIMIZERS[name](net.parameters())) for net in nets)
    fast = pygraph.jit(plain, strict=True)
    for batch in batches(device, 4):
        torch.testing.assert_close(fast(*batch), slow(*batch), rtol=0, atol=0)
    assert fast.explain().to_dict()["fallbacks"] == []
    # Without state, the first step is a graph as well, of a kind of its own: it finds no gradients.
    assert fast.cache_info().captures == (2 if name == "SGD" else 1)


def test_strict_raises_where_state_is_made_at_every_call(device: torch.device) -> None:
    net = make_net(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    inner = step_of(net, optimizer)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.state.clear()
        return inner(x, y)

    fast = pygraph.jit(step, strict=True)
    (first, second) = batches(device, 2)
    fast(*first)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(FallbackError, match="state"):
        fast(*second)
    assert all(map(torch.equal, before, net.parameters()))


def test_strict_allows_a_cache_that_is_filled_once(device: torch.device) -> None:
    @functools.cache
    def table() -> Tensor:
        return torch.arange(3.0, device=device)

    fast = pygraph.jit(lambda x: x * table(), strict=True)
    x = torch.ones(3, device=device)
    for _ in range(3):
        assert fast(x).tolist() == [0.0, 1.0, 2.0]
    assert fast.explain().to_dict()["fallbacks"] == []
    assert fast.cache_info().captures == 1


def test_a_change_is_named_that_cannot_be_passed(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.seen = 0, set[int]()

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.seen.add(self.count)
            return x * 2

    with pytest.raises(FallbackError, match=r"^Model\(…\): it changes seen;"):
        pygraph.jit(Model(), strict=True)(torch.ones(3, device=device))
