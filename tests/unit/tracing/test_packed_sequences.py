"""Packed sequences: they run between graphs, and whatever the lengths are a step has one trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import pygraph
from tests.steps import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN's, that they are put together

STEPS, BATCH, CALLS = 7, 4, 6


def lengths_of(call: int, *, longest: int = STEPS) -> list[int]:
    """Other ones at each of three calls, of the same longest."""
    return [longest, *random.Random(call % 3).choices(range(1, longest + 1), k=BATCH - 1)]


class Classifier(nn.Module):
    def __init__(self, layer: nn.Module, *, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding, self.layer, self.batch_first = nn.Embedding(20, 8), layer, batch_first
        self.head = nn.LazyLinear(3)

    def forward(self, x: Tensor, lengths: Any) -> Tensor:
        found = pack_padded_sequence(self.embedding(x), lengths, self.batch_first, enforce_sorted=False)
        outputs, state = self.layer(found)
        padded, counts = pad_packed_sequence(outputs, self.batch_first)
        states = state if isinstance(state, Tensor) else torch.cat(state, -1)
        mean = padded.sum(1 if self.batch_first else 0) / counts.to(padded.device)[:, None]
        return self.head(torch.cat([mean, states[-1]], -1))


def training(device: torch.device, layer: nn.Module, run: Callable[..., Any], *, on_device: bool = False) -> Any:
    """Results of some steps, and the function."""
    torch.manual_seed(0)
    net = Classifier(layer, batch_first=getattr(layer, "batch_first", True))
    first = torch.zeros(2, 2, dtype=torch.long)
    net(first, torch.tensor([2, 1]))  # makes the head
    net = net.to(device)
    for one in net.parameters():
        nn.init.uniform_(one, -0.5, 0.5)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x, lengths.cpu()), target)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    call, found = run(step), list[Any]()
    for number in range(CALLS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randint(0, 20, (BATCH, STEPS), generator=generator)
        x = x if net.batch_first else x.T.contiguous()
        lengths = torch.tensor(lengths_of(number))
        target = torch.randint(0, 3, (BATCH,), generator=generator)
        taken = lengths.to(device) if on_device else lengths
        found.append((call(x.to(device), taken, target.to(device)), [one.detach().clone() for one in net.parameters()]))
    return found, call


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(8, 6, batch_first=True),
    "GRU": lambda: nn.GRU(8, 6, 2, bidirectional=True),
    "RNN": lambda: nn.RNN(8, 6, batch_first=True, bias=False),
    "projected": lambda: nn.LSTM(8, 6, batch_first=True, proj_size=4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_has_one_trace_for_all_lengths(device: torch.device, name: str) -> None:
    mine, fast = training(device, LAYERS[name](), pygraph.jit)
    assert_same(mine, training(device, LAYERS[name](), lambda fn: fn)[0], device)
    # The first step finds no gradients there; there are three kinds of lengths.
    entries = [one for one in fast.explain().to_dict()["entries"] if one["kernels"]]
    assert len(entries) <= 2
    assert all(entry["kernels_in_graphs"] >= 0.7 * entry["kernels"] for entry in entries)
    assert fast.cache_info().hits >= CALLS - 3


def test_lengths_on_the_device(device: torch.device) -> None:
    mine, fast = training(device, LAYERS["GRU"](), pygraph.jit, on_device=True)
    assert_same(mine, training(device, LAYERS["GRU"](), lambda fn: fn, on_device=True)[0], device)
    assert fast.cache_info().hits >= CALLS - 3


def test_the_longest_length_is_a_path(device: torch.device) -> None:
    layer = LAYERS["LSTM"]().to(device).requires_grad_(False)

    @pygraph.jit
    def outputs(x: Tensor, lengths: list[int]) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(layer(packed)[0], batch_first=True)

    for longest in (5, 3, 5, 3):
        x, lengths = torch.randn(BATCH, STEPS, 8, device=device), lengths_of(longest, longest=longest)
        found, counts = outputs(x, lengths)
        assert found.shape == (BATCH, longest, 6)
        assert counts.tolist() == lengths
        assert counts.device.type == "cpu"
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        assert_same(found, pad_packed_sequence(layer(packed)[0], batch_first=True)[0], device)


def test_what_takes_the_steps_is_a_path_for_each_number_of_them(device: torch.device) -> None:
    """As captions are learnt: of the outputs, and of targets that are packed in the same way."""
    layer = LAYERS["LSTM"]().to(device)
    head = nn.Linear(6, 20).to(device)
    parameters = [*layer.parameters(), *head.parameters()]

    def gradients(x: Tensor, targets: Tensor, lengths: list[int]) -> Any:
        wanted = pack_padded_sequence(targets, lengths, batch_first=True)[0]
        outputs, _ = layer(pack_padded_sequence(x, lengths, batch_first=True))
        loss = F.cross_entropy(head(F.relu(outputs.data)), wanted)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    fast = pygraph.jit(gradients)
    for number in range(CALLS):
        lengths = sorted(lengths_of(number % 2), reverse=True)
        x, targets = torch.randn(BATCH, STEPS, 8, device=device), torch.randint(0, 20, (BATCH, STEPS), device=device)
        assert_same(fast(x, targets, lengths), gradients(x, targets, lengths), device)
    assert fast.cache_info().captures > 0
    assert fast.cache_info().hits >= 2


def test_sequences_that_are_packed_outside(device: torch.device) -> None:
    layer = LAYERS["LSTM"]().to(device)

    def outputs(packed: PackedSequence) -> Any:
        found, state = layer(packed)
        return (*pad_packed_sequence(found, padding_value=0.5, total_length=STEPS + 2), state, found)

    fast = pygraph.jit(torch.no_grad()(outputs))
    for number in range(CALLS):
        rows = [torch.randn(length, 8, device=device) for length in lengths_of(number % 2)]
        packed = pack_sequence(rows, enforce_sorted=False)
        with torch.no_grad():
            expected = outputs(packed)
        got = fast(packed)
        assert isinstance(got[3], PackedSequence)
        assert got[3].batch_sizes.device.type == "cpu"
        assert_same(got, expected, device)


def test_differentiated_from_outside(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = LAYERS["GRU"]().to(device)

    def last(x: Tensor, lengths: Tensor) -> Tensor:
        return layer(pack_padded_sequence(x, lengths, enforce_sorted=False))[1]

    fast = pygraph.jit(last)
    for number in range(CALLS):
        x = torch.randn(STEPS, BATCH, 8, device=device, requires_grad=True)
        lengths, found = torch.tensor(lengths_of(number)), list[Any]()
        for run in (last, fast):
            y = run(x, lengths)
            found.append((y.detach(), torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])))
        assert_same(found[1], found[0], device)


def test_wrong_lengths_are_eagers_error(device: torch.device) -> None:
    @pygraph.jit
    def packed(x: Tensor, lengths: Tensor) -> Tensor:
        return pack_padded_sequence(x * 2, lengths).data

    x = torch.randn(STEPS, BATCH, 3, device=device)
    for lengths in ([7, 5, 3, 1], [7, 5, 3, 0], [3, 5, 7, 1], [7, 5, 3, 1]):
        if lengths == [7, 5, 3, 1]:
            assert_same(
                packed(x, torch.tensor(lengths)), pack_padded_sequence(x * 2, torch.tensor(lengths)).data, device
            )
            continue
        with pytest.raises(RuntimeError, match=r"Length of all samples|must be sorted"):
            packed(x, torch.tensor(lengths))


def test_a_layer_with_dropout_runs_between_graphs(device: torch.device) -> None:
    """Its numbers are drawn by cuDNN; gradients go back in Python, and the optimizer is a graph."""

    def train(run: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        layer, head = nn.LSTM(8, 6, 2, dropout=0.5).to(device), nn.Linear(6, 3).to(device)
        parameters = [*layer.parameters(), *head.parameters()]
        optimizer = torch.optim.Adam(parameters, 0.01)

        def step(x: Tensor, lengths: Tensor, target: Tensor) -> float:
            optimizer.zero_grad()
            _, state = layer(pack_padded_sequence(x, lengths))
            loss = F.cross_entropy(head(state[0][-1]), target)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            return loss.item()

        call, found = run(step), list[Any]()
        for number in range(8):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(STEPS, BATCH, 8, generator=generator).to(device)
            lengths = torch.tensor(sorted(lengths_of(number), reverse=True))
            loss = call(x, lengths, torch.tensor([0, 1, 2, 0], device=device))
            found.append((torch.tensor(loss), [one.detach().clone() for one in parameters]))
        return found, call

    mine, fast = train(pygraph.jit)
    assert_same(mine, train(lambda fn: fn)[0], device)
    kernels = max(entry["kernels_in_graphs"] for entry in fast.explain().to_dict()["entries"])
    assert kernels >= (5 if device.type == "cuda" else 40)  # Adam's
