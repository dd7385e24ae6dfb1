"""Jitted modules inside of modules, autocast around and inside of them, and training through them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pygraph
from tests.modules import Pair, nothing_new
from tests.unit.interop.common import check_same

pytestmark = pytest.mark.rotates


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(F.gelu(self.linear(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(device)


def jit_parts(model: Net) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = pygraph.jit(block)


def parts_of(model: Any) -> list[Any]:
    return [block for block in model.blocks if hasattr(block, "cache_info")]


def pair_with(device: torch.device, parts: bool, whole: bool) -> Pair:
    """A pair whose fast module has jitted blocks, is jitted itself, or both."""
    torch.manual_seed(0)
    pair = Pair(Net(), device)
    if parts:
        jit_parts(pair.fast)
    if not whole:
        pair.fast = pair.fast._pygraph_module
    return pair


NESTINGS = {"the whole": (False, True), "its parts": (True, False), "both": (True, True)}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
@pytest.mark.parametrize("name", NESTINGS)
def test_nested(device: torch.device, name: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_with(device, *NESTINGS[name])
    for training in (True, False):
        pair.change(lambda m, training=training: m.train(training))
        pair.check(batch(device, 0), grad=grad)
    with nothing_new(monkeypatch, device):
        for turn in range(4):
            pair.change(lambda m, turn=turn: m.train(turn % 2 == 0))
            pair.check(batch(device, turn), grad=grad)
            pair.change(lambda m: m.blocks[0].linear.weight.mul_(1.1))
            pair.check(batch(device, turn), grad=grad)
    assert list(pair.fast.state_dict()) == list(pair.reference.state_dict())
    jitted = [pair.fast] if NESTINGS[name][1] else parts_of(pair.fast)
    for module in jitted:
        report = module.explain().to_dict()
        assert not report["fallbacks"], report["fallbacks"]
        assert module.cache_info().captures > 0
    if name == "both":  # the inner ones became part of the outer graph
        assert all(part.cache_info().captures == 0 for part in parts_of(pair.fast))


def test_a_part_of_which_nothing_is_trained(device: torch.device) -> None:
    """A frozen encoder below a head that learns: the gradient goes through it, or nowhere."""
    torch.manual_seed(0)
    pair = Pair(Net(), device)
    jit_parts(pair.fast)
    pair.fast = pair.fast._pygraph_module
    pair.change(lambda m: m.blocks[0].requires_grad_(False))
    for turn in range(4):
        pair.change(lambda m, turn=turn: m.blocks[1].requires_grad_(turn % 2 == 0))
        for call in range(2):
            pair.check(batch(device, call), grad=True)
    assert all(part.cache_info().captures > 0 for part in parts_of(pair.fast))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NESTINGS)
def test_training_through_it(device: torch.device, name: str, optimizer: str) -> None:
    """The loop of every tutorial, with evaluation in between; all that is there in the end is eager's."""
    found: list[Any] = []
    fast: Any = None
    for parts, whole in (NESTINGS[name], (False, False)):
        torch.manual_seed(0)
        model: Any = Net().to(device)
        if parts:
            jit_parts(model)
        if whole:
            model = pygraph.jit(model)
        if parts or whole:
            fast = model
        update = OPTIMIZERS[optimizer](model.parameters())
        losses = []
        for step in range(8):
            update.zero_grad()
            loss = F.cross_entropy(model.train()(batch(device, step)), torch.arange(6, device=device) % 3)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update.step()
            losses.append(loss.detach().clone())
            if step % 3 == 2:
                with torch.no_grad():
                    losses.append(model.eval()(batch(device, step)).square().mean())
        found.append((losses, {k: v.clone() for k, v in model.state_dict().items()}))
    torch.testing.assert_close(*found, rtol=0, atol=0) if device.type == "emu" else torch.testing.assert_close(*found)
    for module in [fast] if hasattr(fast, "cache_info") else parts_of(fast):
        assert not module.explain().to_dict()["fallbacks"]
        assert module.cache_info().captures <= 4  # forward and backward of training, evaluation, and one to begin with


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("where", ["around", "inside", "both", "switched off inside"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
def test_autocast(device: torch.device, where: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going in and out of it is another kind of call, traced once for each."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where in ("around",):
                return self.net(x).float()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=where != "switched off inside"):
                return self.net(x).float()

    pair = Pair(Casting(), device)

    def calls(turns: int) -> None:
        for turn in range(turns):
            around = where != "inside" and turn % 2 == 0
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=around):
                pair.check(batch(device, turn), grad=grad)

    calls(2)
    with nothing_new(monkeypatch, device):
        calls(6)
    pair.assert_graphs(grad)


def test_another_dtype_of_autocast(device: torch.device) -> None:
    torch.manual_seed(0)
    pair = Pair(nn.Linear(4, 4), device)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast(device.type, dtype=dtype):
            assert pair.check(batch(device, 0)).dtype is dtype
    assert pair.fast.cache_info().captures == 2


def test_gradients_add_up_over_calls(device: torch.device) -> None:
    """Two calls and one backward, two backwards, and `.grad` that was there before."""
    torch.manual_seed(0)
    pair = Pair(Net(), device)
    pair.change(lambda m: m.eval())
    for _ in range(2):
        for model in (pair.fast, pair.reference):
            (model(batch(device, 0)).sum() + model(batch(device, 1)).square().sum()).backward()
            model(batch(device, 2)).sum().backward()
        check_same(*([p.grad for p in m.parameters()] for m in (pair.fast, pair.reference)))
    pair.check(batch(device, 0), grad=True)
    pair.assert_graphs(grad=True)


def test_a_copy_of_a_module_with_jitted_parts_learns_by_itself(device: torch.device) -> None:
    pair = pair_with(device, parts=True, whole=True)
    pair.check(batch(device, 0), grad=True)
    other = copy.deepcopy(pair.fast)
    pair.change(lambda m: m.head.weight.zero_())
    with torch.no_grad():
        assert pair.fast.eval()(batch(device, 0)).std(0).max() == 0
        assert other.eval()(batch(device, 0)).std(0).max() > 0
