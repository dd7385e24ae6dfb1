"""What a module holds: statistics, caches of keys and values, tied weights, and states that go out and in again."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pygraph
from tests.modules import Pair, nothing_new
from tests.unit.interop.common import check_same


class Normed(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class Tied(nn.Module):
    """An embedding whose weight is the output's too, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


class Cached(nn.Module):
    """Attention over keys and values that are kept in buffers, as a decoder's static cache."""

    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.register_buffer("keys", torch.zeros(2, length, 4))
        self.register_buffer("values", torch.zeros(2, length, 4), persistent=False)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        self.keys.index_copy_(1, position, key)  # pyright: ignore
        self.values.index_copy_(1, position, value)  # pyright: ignore
        seen = torch.arange(self.keys.shape[1], device=x.device) <= position[:, None]  # pyright: ignore
        return F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)  # pyright: ignore


def tied_pair(device: torch.device) -> Pair:
    pair = Pair(Tied(), device)
    pair.change(lambda m: m.tie())  # a move to a device of another backend leaves copies
    return pair


def batch(device: torch.device, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (5, 4)), generator=torch.Generator().manual_seed(seed)).to(device)


def tokens(device: torch.device, seed: int) -> torch.Tensor:
    return torch.randint(0, 7, (2, 3), generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
def test_running_statistics(device: torch.device, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(Normed(), device)
    pair.check(batch(device, 0), grad=grad)
    with nothing_new(monkeypatch, device):
        for seed in range(5):
            pair.check(batch(device, seed), grad=grad)
        pair.change(lambda m: m.norm.reset_running_stats())
        pair.check(batch(device, 6), grad=grad)
    assert pair.reference.norm.num_batches_tracked.item() == 1
    pair.assert_graphs(grad)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
def test_cumulative_statistics_ask_for_their_count(device: torch.device, grad: bool) -> None:
    """`momentum=None` divides by a number of batches that is on the device, which the host reads."""
    pair = Pair(Normed(momentum=None), device)
    for turn in range(4):
        pair.change(lambda m, turn=turn: m.train(turn % 2 == 0))
        for call in range(2):
            pair.check(batch(device, turn + call), grad=grad)
    reasons = [fallback["reason"] for fallback in pair.fast.explain().to_dict()["fallbacks"]]
    assert any("needs a value on the host" in reason for reason in reasons), reasons


def test_a_buffer_that_is_replaced(device: torch.device, native: bool) -> None:
    pair = Pair(Normed(), device)
    pair.change(lambda m: m.eval())
    for seed in range(4):
        pair.change(lambda m, seed=seed: setattr(m.norm, "running_mean", batch(device, seed, 4)))
        for _ in range(2):
            pair.check(batch(device, seed))
    pair.assert_graphs()


def test_a_buffer_that_comes_and_goes(device: torch.device, native: bool) -> None:
    pair = Pair(Normed(), device)
    pair.change(lambda m: m.eval())
    for seed in range(4):
        pair.change(lambda m: setattr(m.norm, "running_mean", None))
        pair.change(lambda m: setattr(m.norm, "running_var", None))
        pair.check(batch(device, seed))
        pair.change(lambda m: setattr(m.norm, "running_mean", torch.zeros(4, device=device)))
        pair.change(lambda m: setattr(m.norm, "running_var", torch.ones(4, device=device)))
        pair.check(batch(device, seed))
    pair.assert_graphs()


def test_a_cache_of_keys_and_values(device: torch.device, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph writes every position, and what earlier calls wrote is read."""
    pair = Pair(Cached(), device)

    def step(position: int) -> None:
        pair.check(batch(device, position, 2, 1, 4), torch.tensor([position], device=device))

    step(0)
    with nothing_new(monkeypatch, device):
        for position in range(1, 8):
            step(position)
        pair.change(lambda m: (m.keys.zero_(), m.values.zero_()))
        for position in range(4):
            step(position)
    assert pair.fast.cache_info().captures == 1
    pair.assert_graphs()


def test_a_cache_that_is_replaced(device: torch.device, native: bool) -> None:
    """A batch of another size brings other buffers; the graph for the old ones must not write to those."""
    pair = Pair(Cached(), device)
    for size in (2, 3, 2):
        pair.change(lambda m, size=size: m.register_buffer("keys", torch.zeros(size, 8, 4, device=device)))
        pair.change(
            lambda m, size=size: m.register_buffer("values", torch.zeros(size, 8, 4, device=device), persistent=False)
        )
        for position in range(3):
            pair.check(batch(device, position, size, 1, 4), torch.tensor([position], device=device))
    pair.assert_graphs()


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
def test_tied_weights(device: torch.device, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One parameter in two places has one gradient, the sum; an update is seen in both."""
    pair = tied_pair(device)
    assert len(list(pair.fast.parameters())) == 3
    pair.check(tokens(device, 0), grad=grad)
    with nothing_new(monkeypatch, device):
        for seed in range(3):
            pair.change(lambda m, seed=seed: m.embedding.weight.add_(batch(device, seed, 7, 4)))
            pair.check(tokens(device, seed), grad=grad)
    pair.assert_graphs(grad)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
def test_weights_that_are_untied_and_tied_again(device: torch.device, grad: bool) -> None:
    pair = tied_pair(device)
    for _ in range(2):
        pair.check(tokens(device, 0), grad=grad)
        pair.change(lambda m: setattr(m.head, "weight", nn.Parameter(m.embedding.weight.clone())))
        pair.check(tokens(device, 1), grad=grad)
        pair.change(lambda m: m.head.weight.mul_(2))
        pair.check(tokens(device, 1), grad=grad)
        pair.change(lambda m: setattr(m.head, "weight", m.embedding.weight))
        pair.check(tokens(device, 2), grad=grad)
    pair.assert_graphs(grad)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "backward"])
def test_a_state_goes_out_and_in_again(device: torch.device, assign: bool, grad: bool) -> None:
    """Out of either, into either, with the same keys; tied weights stay tied where eager's do."""
    pair = Pair(Normed(), device)
    saved = {}
    for seed in range(3):
        pair.check(batch(device, seed), grad=grad)
        saved[seed] = copy.deepcopy(pair.fast.state_dict())
        assert list(saved[seed]) == list(pair.reference.state_dict())
        check_same(dict(saved[seed]), dict(pair.reference.state_dict()))
        pair.change(lambda m: m.linear.weight.mul_(1.5))
    for seed in (0, 2, 1):
        pair.change(lambda m, seed=seed: m.load_state_dict(copy.deepcopy(saved[seed]), assign=assign))
        for _ in range(2):
            pair.check(batch(device, seed), grad=grad)
    memory = io.BytesIO()
    torch.save({name: value.cpu() for name, value in pair.fast.state_dict().items()}, memory)
    memory.seek(0)
    state = {name: value.to(device) for name, value in torch.load(memory).items()}
    pair.change(lambda m: m.load_state_dict({k: v.clone() for k, v in state.items()}, assign=assign))
    pair.check(batch(device, 9), grad=grad)
    pair.assert_graphs(grad)


def test_a_state_that_does_not_fit_is_eagers_error(device: torch.device) -> None:
    pair = Pair(Normed(), device)
    pair.check(batch(device, 0))
    for model in (pair.fast, pair.reference):
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
    pair.check(batch(device, 0))


def test_a_tied_state_that_is_assigned(device: torch.device) -> None:
    pair = tied_pair(device)
    pair.check(tokens(device, 0))
    state = {name: value.clone() for name, value in pair.fast.state_dict().items()}
    pair.change(lambda m: m.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True))
    pair.change(lambda m: m.head.weight.mul_(2))
    for grad in (False, True):
        pair.check(tokens(device, 1), grad=grad)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_graphs_of_its_own(device: torch.device, how: str) -> None:
    if how == "pickle" and device.type == "emu":
        pytest.skip("torch does not unpickle tensors of a device written in Python")
    pair = Pair(Normed(), device)
    pair.change(lambda m: m.eval())
    for _ in range(3):
        pair.check(batch(device, 0))
    copied: Any = copy.deepcopy(pair.fast) if how == "deepcopy" else pickle.loads(pickle.dumps(pair.fast))
    assert copied.cache_info() == (0, 0, 0, 0, 0)
    x = batch(device, 1)
    with torch.no_grad():
        for _ in range(3):
            check_same(copied(x), pair.reference(x))
        assert copied.cache_info().captures == 1
        before = copied(x)
        pair.change(lambda m: m.linear.weight.zero_())
        check_same(copied(x), before)
    pair.check(x)
    copied.train()
    assert not pair.fast.training


def test_a_deepcopy_under_autograd(device: torch.device) -> None:
    pair = Pair(Normed(), device)
    pair.check(batch(device, 0), grad=True)
    copied = Pair(Normed(), device)
    copied.fast, copied.reference = copy.deepcopy(pair.fast), copy.deepcopy(pair.reference)
    for seed in range(2):
        copied.check(batch(device, seed), grad=True)
        pair.check(batch(device, seed), grad=True)
    copied.assert_graphs(grad=True)


def test_a_module_without_tensors(device: torch.device) -> None:
    fast = pygraph.jit(nn.GELU())
    for seed in range(3):
        x = batch(device, seed)
        check_same(fast(x), F.gelu(x))
    assert fast.cache_info().captures == 1
    assert not fast.state_dict()


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_function_that_goes_through_all_tensors_of_a_module_finds_new_ones(
    kind: str, count: int, native: bool, device: torch.device
) -> None:
    """As the penalty of a loss does."""

    class Plain(nn.Module):
        def add(self, name: str, value: float) -> None:
            tensor = torch.full((3,), value, device=device)
            if kind == "buffer":
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for tensor in self.buffers() if kind == "buffer" else self.parameters():
                x = x * tensor
            return x + 1

    module = Plain()
    for number in range(count):
        module.add(f"t{number}", number + 2.0)
    fast, x = pygraph.jit(module), torch.ones(3, device=device)
    for change in (lambda: None, lambda: module.add("new", 7.0), lambda: delattr(module, "new")):
        change()
        for _ in range(3):
            assert torch.equal(fast(x), module(x))
