"""What of a module goes back and forth has a graph for each way it is, and is traced once for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from tests.memory import live_bytes
from tests.modules import Pair, nothing_new
from tests.unit.interop.common import counted

pytestmark = pytest.mark.rotates


class Net(nn.Module):
    """Everything that a training flag changes: statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x))))) * self.scale


class Labelled(Net):
    """It has a text by which it decides."""

    label = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.label else x


class Plain(nn.Module):
    """Parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def pair_of(device: torch.device, kind: type[nn.Module] = Net, **options: Any) -> Pair:
    torch.manual_seed(0)
    return Pair(kind(), device, **options)


def batch(device: torch.device, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 4, generator=generator).to(device, dtype)


def other_state(device: torch.device, seed: int, kind: type[nn.Module] = Net) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return kind().to(device).state_dict()


TOGGLES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "the training flag": (lambda m: m.train(), lambda m: m.eval()),
    "the flag of one part": (lambda m: m.dropout.train(), lambda m: m.dropout.eval()),
    "requires_grad of all": (lambda m: m.requires_grad_(), lambda m: m.requires_grad_(False)),
    "requires_grad of one part": (lambda m: m.first.requires_grad_(), lambda m: m.first.requires_grad_(False)),
    "a number": (lambda m: setattr(m, "scale", 1.0), lambda m: setattr(m, "scale", 2.5)),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
@pytest.mark.parametrize("name", TOGGLES)
def test_what_goes_back_and_forth_is_traced_once_for_each(
    device: torch.device, name: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, toggles = pair_of(device), TOGGLES[name]
    for seed, toggle in enumerate(toggles):
        pair.change(toggle)
        pair.check(batch(device, seed), grad=grad)
    with nothing_new(monkeypatch, device) as work:
        held = []
        for turn in range(6):
            pair.change(toggles[turn % 2])
            for call in range(1 + turn % 3):  # once, so that no plan is made; or often, so that one serves
                result = pair.check(batch(device, 10 * turn + call), grad=grad)
                held.append((result, result.clone()))
    assert work.replays >= 12
    assert all(torch.equal(result, copy) for result, copy in held)
    pair.assert_graphs(grad)


def test_a_result_belongs_to_the_mode_of_its_call(device: torch.device, native: bool) -> None:
    """A graph of one mode never serves the other, however often either was called."""
    pair = pair_of(device)
    x = batch(device, 0)
    for training in (True, False, True, True, True, False, False, False, True, False):
        pair.change(lambda m, training=training: m.train(training))
        pair.check(x)


def test_gradients_are_those_of_the_mode_in_which_the_forward_ran(device: torch.device) -> None:
    """The mode changes between a forward and its backward, which are compiled for the mode of the forward."""
    pair = pair_of(device)
    for _ in range(3):
        gradients = []
        for model in (pair.fast, pair.reference):
            torch.manual_seed(0)
            first = model.train()(batch(device, 1)).square().sum()
            second = model.eval()(batch(device, 2)).square().sum()
            model.train()
            gradients.append([*torch.autograd.grad(first, list(model.parameters())),
                              *torch.autograd.grad(second, list(model.parameters()))])  # fmt: skip
        torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_ways_to_be_are_bounded(device: torch.device) -> None:
    """A text that never comes back does not fill the cache, and the least recently used way makes room."""
    pair = pair_of(device, Labelled, max_graphs=64)
    pair.change(lambda m: m.eval())
    for label in range(20):
        pair.change(lambda m, label=label: setattr(m, "label", str(label)))
        for _ in range(2):
            pair.check(batch(device, label))
    assert pair.fast.cache_info().size <= 8
    assert pair.fast.cache_info().captures == 20


def test_a_number_that_never_comes_back_is_live(device: torch.device) -> None:
    """The third value says so: two, as of a flag, are cheaper baked in."""
    pair = pair_of(device, max_graphs=64)
    pair.change(lambda m: m.eval())
    for scale in range(20):
        pair.change(lambda m, scale=scale: setattr(m, "scale", float(scale)))
        for _ in range(2):
            pair.check(batch(device, scale))
    assert pair.fast.cache_info().size == 1
    assert pair.fast.cache_info().captures == 3


def test_the_budget_counts_every_way(device: torch.device) -> None:
    pair = pair_of(device, Labelled, max_graphs=2)
    for label in "abca":
        pair.change(lambda m, label=label: setattr(m, "label", label))
        pair.check(batch(device, 0))
    info = pair.fast.cache_info()
    assert (info.size, info.captures, info.evictions) == (2, 4, 2)


def test_what_was_replaced_is_not_kept_alive(device: torch.device) -> None:
    """Another object in its place does not come back by itself, so nothing is kept for the old one."""
    pair = pair_of(device, Plain)
    x = batch(device, 0)
    for _ in range(2):
        pair.check(x)
    before = None
    for seed in range(6):
        pair.change(lambda m, seed=seed: m.load_state_dict(other_state(device, seed, Plain), assign=True))
        pair.check(x)
        now = live_bytes(device)
        assert before is None or now <= before
        before = now
    assert pair.fast.cache_info().size == 1


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
def test_loading_a_state_traces_nothing(device: torch.device, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(device)
    pair.check(batch(device, 0), grad=grad)
    with nothing_new(monkeypatch, device):
        for seed in range(4):
            pair.change(lambda m, seed=seed: m.load_state_dict(other_state(device, seed)))
            pair.check(batch(device, seed), grad=grad)
    pair.assert_graphs(grad)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
def test_another_dtype_and_back(device: torch.device, grad: bool) -> None:
    pair = pair_of(device)
    for turn in range(6):
        dtype = (torch.float32, torch.float64)[turn % 2]
        pair.change(lambda m, dtype=dtype: m.to(dtype))
        for call in range(2):
            assert pair.check(batch(device, call, dtype), grad=grad).dtype is dtype
    pair.assert_graphs(grad)


def test_parameters_that_have_moved_are_recorded_and_not_traced(
    device: torch.device, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To another dtype and back, they are the same objects at other addresses: what was traced still holds."""
    pair = pair_of(device, Plain)
    for dtype in (torch.float32, torch.float64):
        pair.change(lambda m, dtype=dtype: m.to(dtype))
        pair.check(batch(device, 0, dtype))
    captures = pair.fast.cache_info().captures
    with counted(monkeypatch, device) as work:
        for turn in range(4):
            dtype = (torch.float32, torch.float64)[turn % 2]
            pair.change(lambda m, dtype=dtype: m.to(dtype))
            for call in range(2):
                pair.check(batch(device, call, dtype))
    assert work.traces == 0
    assert pair.fast.cache_info().captures <= captures + 4  # fewer where the allocator gives the same memory again
    pair.assert_graphs()


def test_parameters_that_lie_in_one_memory_now_are_looked_at_again(device: torch.device) -> None:
    """They were apart when the update was traced; now writing to one writes to the other."""
    a, b = (nn.Parameter(torch.ones(4, device=device), requires_grad=False) for _ in range(2))

    def fn(x: torch.Tensor) -> torch.Tensor:
        a.add_(x)
        return b * 2

    fast = pygraph.jit(fn)
    x = torch.ones(4, device=device)
    assert fast(x).tolist() == [2.0] * 4
    b.data = a.data
    for _ in range(2):
        before = a.clone()
        assert torch.equal(fast(x), (before + 1) * 2)
        assert torch.equal(a, before + 1)


def test_to_the_host_and_back(device: torch.device, native: bool) -> None:
    pair = pair_of(device)
    for turn in range(4):
        where = (device, torch.device("cpu"))[turn % 2]
        pair.change(lambda m, where=where: m.to(where))
        for call in range(2):
            assert pair.check(batch(where, call)).device.type == where.type


class Checked(nn.Module):
    """What cannot be a graph in training: it asks for the text of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not str(x):
            return x
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
@pytest.mark.parametrize("first", [True, False], ids=["training first", "evaluation first"])
def test_what_cannot_be_traced_in_one_mode_is_a_graph_in_the_other(
    device: torch.device, grad: bool, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(device, Checked)
    for training in (first, not first, first):
        pair.change(lambda m, training=training: m.train(training))
        for seed in range(3):
            pair.check(batch(device, seed), grad=grad)
    assert pair.fast.cache_info().captures > 0
    assert "the text of a tensor" in str(pair.fast.explain().to_dict()["in_python"])
    with counted(monkeypatch, device) as work:
        for turn in range(6):
            pair.change(lambda m, turn=turn: m.train(turn % 2 == 0))
            for seed in range(1 + turn % 3):
                pair.check(batch(device, seed), grad=grad)
    assert (work.traces, work.captures) == (0, 0)
    assert work.replays > 0


def test_what_is_refused_keeps_no_module_alive(device: torch.device) -> None:
    pair = pair_of(device, Checked)
    pair.check(batch(device, 0))
    before = live_bytes(device)
    for _ in range(3):
        pair.change(lambda m: setattr(m, "linear", nn.Linear(4, 4).to(device)))
        for _ in range(2):
            pair.check(batch(device, 0))
    assert live_bytes(device) <= before
