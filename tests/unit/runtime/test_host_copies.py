"""Copies on the host of what a first call has no second place for on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import pygraph
from pygraph.runtime import copies, executable, host_copies
from pygraph.runtime.body import RegionBody
from pygraph.runtime.copies import ChangedError, trial_leaves
from pygraph.runtime.devices import driver_for
from pygraph.runtime.emulated import driver as emulated
from pygraph.runtime.host_copies import HostCopy, OffloadedTensors, bytes_of
from pygraph.runtime.proof import Trial, WrittenState
from tests.memory import live_bytes, peak_followed


@pytest.fixture(autouse=True)
def _few_bytes_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "LARGE", 64)


LAYOUTS = {
    "plain": lambda x: x,
    "view": lambda x: x[1:],
    "transposed": lambda x: x.t(),
    "gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1),
    "nan": lambda x: x.masked_fill(x > 3, float("nan")),
    "integers": lambda x: x.to(torch.int64),
    "bfloat16": lambda x: x.bfloat16(),
    "8 bits": lambda x: x.to(torch.float8_e5m2),
    "complex": lambda x: torch.complex(x, x),
}


def bits(tensor: torch.Tensor) -> list[int]:
    return bytes_of(tensor).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_come_back_bit_for_bit(device: torch.device, layout: str) -> None:
    tensor = LAYOUTS[layout](torch.arange(64.0).view(8, 8)).to(device)
    kept = OffloadedTensors([tensor, tensor])
    again, _ = kept
    before = live_bytes(device)
    assert len(kept) == 2
    assert (again.dtype, again.shape, again.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert bits(again) == bits(tensor) == bits(kept[1])
    assert again.data_ptr() != tensor.data_ptr()
    del again, tensor
    assert live_bytes(device) < before


def test_small_and_lazy_tensors_stay_where_they_are(device: torch.device) -> None:
    small, host = torch.ones(3, device=device), torch.ones(100)
    lazy = torch.ones(100, dtype=torch.complex64, device=device).conj()
    given = (small, host, lazy)
    assert all(one is other for one, other in zip(given, OffloadedTensors(given), strict=True))


def test_what_has_changed_is_put_back(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "_PIECE", 48)
    tensor = torch.arange(64.0, device=device).view(8, 8)[2:, 1:]
    copy = HostCopy.of(tensor)
    assert copy is not None
    assert not copy.restore(tensor)
    before = bits(tensor)
    tensor[3, 4] = 17
    assert copy.restore(tensor)
    assert bits(tensor) == before


def test_a_host_without_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(nbytes: int) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    monkeypatch.setattr(host_copies, "_touched", fail)
    x = torch.arange(64.0, device=device)
    with trial_leaves([x], ()) as (given,):
        assert given.data_ptr() != x.data_ptr()
    assert pygraph.jit(torch.sin)(x).shape == x.shape


def test_a_host_that_has_nothing_left(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copies there: the kernel may end a process that asks for too much."""
    monkeypatch.setattr(host_copies, "has_room", lambda nbytes: nbytes < 256)
    x, small = torch.arange(64.0, device=device), torch.arange(32.0, device=device)
    kept = OffloadedTensors([x, small])
    assert kept.are_on_host
    assert kept[0] is x
    assert kept[1] is not small
    with trial_leaves([x, small], ()) as (given, read):
        assert given.data_ptr() != x.data_ptr()
        assert read.data_ptr() == small.data_ptr()


def test_large_arguments_are_read_where_they_are(device: torch.device) -> None:
    x, y, small = (torch.arange(float(n), device=device) for n in (64, 48, 3))
    with trial_leaves([x, 3, y, small, x[1:], "text"], {2}) as leaves:
        assert (leaves[1], leaves[5]) == (3, "text")
        assert [leaves[i].data_ptr() for i in (0, 4)] == [x.data_ptr(), x[1:].data_ptr()]
        assert leaves[2].data_ptr() != y.data_ptr(), "written"
        assert leaves[3].data_ptr() != small.data_ptr()
    with trial_leaves([x, x[1:], y], {1}) as leaves:
        pointers = [leaf.data_ptr() for leaf in leaves]
        assert not {*pointers[:2]} & {x.data_ptr(), x[1:].data_ptr()}, "what shares memory with what is written"
        assert pointers[1] - pointers[0] == 4
        assert pointers[2] == y.data_ptr()
    with trial_leaves([x, x[:3]], ()) as leaves:
        assert leaves[0].data_ptr() == leaves[1].data_ptr() != x.data_ptr(), "what shares memory with what is small"
    with trial_leaves([x, y], ()) as leaves:
        assert [leaf.data_ptr() for leaf in leaves] == [x.data_ptr(), y.data_ptr()]


def test_large_arguments_that_are_updated_have_no_second_copy(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region that is only recorded leaves its inputs as they are, as every trial has copies of its own."""

    def update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x * 2

    held: list[int] = []
    original = copies.trial_leaves

    def watch(leaves: Sequence[Any], written: Any) -> Any:
        held.append(len(written))
        return original(leaves, written)

    fast = pygraph.jit(update)
    monkeypatch.setattr(executable, "trial_leaves", watch)
    for number in range(3):
        x, y = torch.full((64,), float(number), device=device), torch.ones(64, device=device)
        assert fast(x, y).tolist() == [2.0 * number + 2] * 64
        assert x.tolist() == [number + 1.0] * 64
    assert held == [0]
    assert not fast.explain().to_dict()["fallbacks"]


def test_a_trial_that_writes_to_an_argument(device: torch.device) -> None:
    x = torch.arange(64.0, device=device)
    before, version = x.tolist(), x._version
    with pytest.raises(ChangedError, match=r"leaves \[0\]"), trial_leaves([x], ()) as (given,):
        given.zero_()
    assert x.tolist() == before
    assert x._version == version
    with pytest.raises(ValueError, match="invalid literal"), trial_leaves([x], ()) as (given,):
        int("mine" if given.zero_().any() == 0 else "1")
    assert x.tolist() == before


def test_a_call_whose_trials_write_to_an_argument_runs_as_it_is(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies.HostCopy, "restore", lambda self, tensor: True)
    fast = pygraph.jit(lambda x: torch.sin(x) + 1)
    x = torch.arange(64.0, device=device)
    for _ in range(3):
        assert torch.equal(fast(x), torch.sin(x) + 1)
    assert "written to arguments that are not updated" in str(fast.explain())


@pytest.mark.parametrize("training", [False, True])
def test_a_first_call_needs_hardly_more_memory_than_the_call(device: torch.device, training: bool) -> None:
    """Arguments and what ordinary launches give are on the device once, and inputs are recorded in one memory."""
    size = 1 << 20
    xs = [torch.ones(size, device=device, requires_grad=training) for _ in range(12)]

    def fn(*xs: torch.Tensor) -> torch.Tensor:
        return sum((torch.tanh(x).sum() for x in xs), torch.zeros((), device=device))

    fast = pygraph.jit(fn)
    before = live_bytes(device)
    with peak_followed(device) as peak:
        result = fast(*xs)
        if training:
            result.backward()
    needed = 4 * size * (2.5 + (12 * 3 if training else 0))  # saved, gradients in the graph's memory and the caller's
    assert peak[0] - before < needed


@pytest.mark.parametrize(("kind", "units"), [("updated", 4), ("captured", 2), ("shared", 14)])
def test_memory_of_a_first_call(kind: str, units: int) -> None:
    """A trial puts back what is updated, arguments and captured tensors; shared memory has no second one.

    On the emulated device: on CUDA, libraries need more.
    """
    emulated.driver()
    device, size, count = torch.device("emu", 0), 1 << 18, 12
    apart = [torch.ones(size, device=device) for _ in range(count)]
    parts = torch.ones(size, count, device=device).unbind(1)

    def update(*xs: torch.Tensor) -> torch.Tensor:
        for x in xs or apart:
            x.mul_(2)
        return (xs or apart)[0].sum()

    def read(*xs: torch.Tensor) -> torch.Tensor:
        return sum((torch.tanh(x).sum() for x in xs), torch.zeros((), device=device))

    fast: Any = pygraph.jit(read if kind == "shared" else update)
    arguments = {"updated": apart, "captured": [], "shared": parts}[kind]
    before = live_bytes(device)
    with peak_followed(device) as peak:
        fast(*arguments)
    assert peak[0] - before < 4 * size * units
    assert not fast.explain().to_dict()["fallbacks"]


@pytest.mark.parametrize("fails", [False, True])
def test_large_arguments_are_updated_where_they_are(device: torch.device, fails: bool) -> None:
    """Trials put them back, whatever happens, and show autograd nothing of it; small ones have copies."""

    def update(x: torch.Tensor, read: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
        x.mul_(read)
        small.add_(1)
        return x.sum() + small.sum()

    x, read = torch.arange(64.0, device=device).view(8, 8)[:, 1:], torch.full((8, 7), 3.0, device=device)
    inputs = [x, read, torch.zeros(3, device=device)]
    driver = driver_for(device)
    assert driver is not None
    body = RegionBody(pygraph.graphify(pygraph.indirect(pygraph.trace(update)(*inputs))), 0)
    before, versions = [bits(one) for one in inputs], [one._version for one in inputs]
    state = WrittenState(body, inputs)
    assert state.in_place == {0}
    expected = pytest.raises(ValueError, match="here") if fails else contextlib.nullcontext()
    with expected, Trial(driver, body, inputs, state) as trial:
        shared = [one.data_ptr() == other.data_ptr() for one, other in zip(trial.inputs, inputs, strict=True)]
        assert shared == [True, True, False]
        for number in range(2):
            trial.restore()
            body.run(trial.inputs)
            assert x[1, 0].item() == 9 * 3 ** (number + 1), "which no index depends on"
            assert trial.inputs[2].tolist() == [1.0] * 3
        if fails:
            raise ValueError("here")
    assert [bits(one) for one in inputs] == before
    assert [one._version for one in inputs] == versions


def test_large_captured_tensors_are_put_back_at_the_end(device: torch.device) -> None:
    """Between runs of a trial only those that indices come from, in whatever form, and small ones are put back."""
    weights = torch.ones(64, device=device)
    small = torch.ones(4, device=device)
    position = torch.zeros(64, device=device)
    other_form = torch.zeros(64, device=device)
    row = other_form.view(8, 8)[0]
    table = torch.arange(200.0, device=device)
    tensors = (weights, small, position, other_form)

    def step() -> torch.Tensor:
        for tensor in tensors:
            tensor.add_(1)
        return table[position.long()] + table[row.long()].sum() + weights.sum() + small.sum()

    driver = driver_for(device)
    assert driver is not None
    body = RegionBody(pygraph.graphify(pygraph.indirect(pygraph.trace(step)())), 0)
    state = WrittenState(body)
    with Trial(driver, body, [], state) as trial:
        for number in range(3):
            trial.restore()
            body.run(trial.inputs)
            assert [int(tensor[1]) for tensor in tensors] == [number + 2, 2, 1, 1]
    assert [int(tensor.min()) for tensor in tensors] == [int(tensor.max()) for tensor in tensors] == [1, 1, 0, 0]
    fast = pygraph.jit(step)
    expected = 2 * 64 + 2 * 4 + 1 + 8
    assert fast().tolist() == [expected] * 64
