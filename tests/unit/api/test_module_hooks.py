"""Hooks and parametrizations, which come and go between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import pygraph
from tests.modules import Pair, nothing_new
from tests.unit.interop.common import check_same

pytestmark = pytest.mark.rotates


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


@pytest.fixture
def pair(device: torch.device) -> Pair:
    torch.manual_seed(0)
    return Pair(Net(), device)


def batch(device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(device)


FORWARD_HOOKS: dict[str, Callable[[Any], Any]] = {
    "after all": lambda m: m.register_forward_hook(lambda module, args, out: out * 2),
    "before all": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "after a part": lambda m: m.first.register_forward_hook(lambda module, args, out: out + args[0]),
    "before a part": lambda m: m.last.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
    "with keywords": lambda m: m.first.register_forward_hook(lambda module, args, kwargs, out: -out, with_kwargs=True),
    "always called": lambda m: m.first.register_forward_hook(lambda module, args, out: out.abs(), always_call=True),
    "of every module": lambda m: nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 3 if isinstance(module, nn.Linear) else None
    ),
}


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
@pytest.mark.parametrize("name", FORWARD_HOOKS)
def test_forward_hooks_come_and_go(
    pair: Pair, device: torch.device, name: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[Any] = []
    for turn in range(2):
        pair.check(batch(device, turn), grad=grad)
        if name == "of every module":
            handles = [FORWARD_HOOKS[name](None)]
        else:
            pair.change(lambda m, handles=handles: handles.append(FORWARD_HOOKS[name](m)))
        pair.check(batch(device, turn), grad=grad)
        with nothing_new(monkeypatch, device):
            pair.check(batch(device, turn + 7), grad=grad)
        while handles:
            handles.pop().remove()
        pair.check(batch(device, turn), grad=grad)
    pair.assert_graphs(grad)


def test_a_hook_keeps_what_it_sees(pair: Pair, device: torch.device) -> None:
    """Collecting activations appends to a list, which is done after each replay."""
    seen: dict[int, list[torch.Tensor]] = {}

    def collect(model: Any) -> None:
        rows = seen.setdefault(len(seen), [])
        handles.append(model.first.register_forward_hook(lambda module, args, out: rows.append(out.detach().clone())))

    handles: list[Any] = []
    for seed in range(2):
        pair.check(batch(device, seed))
    pair.change(collect)
    for seed in range(3):
        pair.check(batch(device, seed))
    assert [len(rows) for rows in seen.values()] == [3, 3]
    check_same(seen[0], seen[1])
    assert pair.fast.explain().to_dict()["fallbacks"] == []
    captures = pair.fast.cache_info().captures
    for handle in handles:
        handle.remove()
    for seed in range(3):
        pair.check(batch(device, seed))
    assert [len(rows) for rows in seen.values()] == [3, 3]
    assert pair.fast.cache_info().captures >= captures


BACKWARD_HOOKS: dict[str, Callable[[Any], Any]] = {
    "gradients of a part": lambda m: m.first.register_full_backward_hook(
        lambda module, into, out: tuple(None if g is None else g * 2 for g in into)
    ),
    "gradients that come": lambda m: m.last.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,)),
    "gradients of all": lambda m: m.register_full_backward_hook(lambda module, into, out: (into[0] + 1,)),
    "a parameter": lambda m: m.first.weight.register_hook(lambda gradient: gradient * 5),
}


@pytest.mark.parametrize("name", BACKWARD_HOOKS)
def test_backward_hooks_come_and_go(pair: Pair, device: torch.device, name: str) -> None:
    for turn in range(2):
        pair.check(batch(device, turn), grad=True)
        handles: list[Any] = []
        pair.change(lambda m, handles=handles: handles.append(BACKWARD_HOOKS[name](m)))
        for call in range(2):
            pair.check(batch(device, turn + call), grad=True)
        for handle in handles:
            handle.remove()
        for call in range(2):
            pair.check(batch(device, turn + call), grad=True)
            pair.check(batch(device, turn + call))
    assert pair.fast.cache_info().captures > 0


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu()


def spectral(model: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        parametrizations.spectral_norm(model.first)


PARAMETRIZATIONS: dict[str, Callable[[Any], object]] = {
    "weight_norm": lambda m: parametrizations.weight_norm(m.first),
    "spectral_norm": spectral,
    "orthogonal": lambda m: parametrizations.orthogonal(m.first),
    "one's own": lambda m: parametrize.register_parametrization(m.first, "weight", Symmetric()),
    "two on one": lambda m: (
        parametrizations.weight_norm(m.first),
        parametrize.register_parametrization(m.first, "weight", Symmetric()),
    ),
}


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrizations(pair: Pair, device: torch.device, name: str, grad: bool) -> None:
    """With their buffers: in training, `spectral_norm` updates its vectors at every call."""
    pair.check(batch(device, 0), grad=grad)
    pair.change(PARAMETRIZATIONS[name])
    for turn in range(5):
        pair.change(lambda m, turn=turn: m.train(turn % 3 != 2))
        for call in range(2):
            pair.check(batch(device, turn + call), grad=grad)
    pair.change(lambda m: [p.mul_(1.25) for p in m.parameters()])
    pair.check(batch(device, 8), grad=grad)
    pair.change(lambda m: setattr(m.first, "weight", torch.eye(4, device=device)) if name == "one's own" else None)
    pair.check(batch(device, 8), grad=grad)
    pair.change(lambda m: parametrize.remove_parametrizations(m.first, "weight"))
    for call in range(2):
        pair.check(batch(device, call), grad=grad)
    pair.assert_graphs(grad)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "two on one"])
def test_a_parametrization_is_traced_once(
    pair: Pair, device: torch.device, name: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.change(PARAMETRIZATIONS[name])
    for training in (True, False):
        pair.change(lambda m, training=training: m.train(training))
        pair.check(batch(device, 0), grad=True)
    with nothing_new(monkeypatch, device):
        for turn in range(4):
            pair.change(lambda m, turn=turn: m.train(turn % 2 == 0))
            pair.check(batch(device, turn), grad=True)
    pair.assert_graphs(grad=True)


def test_a_hook_on_the_jitted_form_is_one_on_the_module(device: torch.device) -> None:
    model = Net().to(device)
    fast = pygraph.jit(model)
    x = batch(device, 0)
    with torch.no_grad():
        plain = fast(x)
        handle = fast.register_forward_hook(lambda module, args, out: out * 10)
        check_same(fast(x), plain * 10)
        check_same(model(x), plain * 10)
        handle.remove()
        check_same(fast(x), plain)
