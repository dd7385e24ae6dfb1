"""Inputs that are recorded in the same memory: which may be, where they lie, and which pointers are found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import pygraph
from pygraph.runtime import discovery, host_copies, patchable
from pygraph.runtime.alignment import alignment_of
from pygraph.runtime.body import RegionBody
from pygraph.runtime.calling_convention import CallingConvention
from pygraph.runtime.pointers import Extent, Word, pointer_words
from pygraph.runtime.recorded_graph import RecordedNode
from pygraph.runtime.recorded_inputs import RecordedInputs, recorded_inputs


@pytest.fixture(autouse=True)
def _few_bytes_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "LARGE", 64)


def body_of(fn: Any, *inputs: torch.Tensor) -> RegionBody:
    return RegionBody(pygraph.graphify(pygraph.indirect(pygraph.trace(fn)(*inputs))), 0)


def test_large_ones_of_a_kind_lie_in_one_memory(device: torch.device) -> None:
    a, b, c = (torch.ones(n, device=device) for n in (640, 480, 800))
    d, e = (torch.ones(640, dtype=torch.bfloat16, device=device) for _ in range(2))
    small, view = torch.ones(3, device=device), torch.ones(700, device=device)[1:]
    inputs = [a, b, c, d, e, small, view]
    found = recorded_inputs(body_of(lambda *xs: sum(x.sum() for x in xs), *inputs), inputs, separate=())
    assert found.together == {0, 1, 2, 3, 4, 6}
    groups: list[list[int]] = []
    end = 0
    for mine, given in zip(found.tensors, inputs, strict=True):
        assert mine is not None
        assert (mine.shape, mine.stride(), mine.dtype) == (given.shape, given.stride(), given.dtype)
        assert alignment_of(mine.data_ptr()) == alignment_of(given.data_ptr())
    tensors = [mine for mine in found.tensors if mine is not None]
    for position in sorted(range(len(inputs)), key=lambda position: tensors[position].data_ptr()):
        start = tensors[position].data_ptr()
        groups += [[]] if start >= end else []
        groups[-1].append(position)
        end = max(end, start + tensors[position].nbytes)
    assert sorted(groups) == [[0, 1, 2, 6], [3, 4], [5]]
    assert len({mine.data_ptr() for mine in tensors}) == len(inputs)
    # Else operations that read one of them and write to another are refused.
    assert len({mine.untyped_storage()._cdata for mine in tensors}) == len(inputs)


def test_which_may_lie_in_one_memory(device: torch.device) -> None:
    ones = [torch.ones(64, device=device) for _ in range(4)]
    indices = [torch.zeros(64, dtype=torch.int64, device=device) for _ in range(4)]

    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        computed, *others = indices
        a.add_(b)
        return sum((c[one] for one in (computed * 2 % 3, *others)), d * a)

    leaves = [*ones, *indices]
    program = pygraph.graphify(pygraph.indirect(pygraph.trace(fn)(*leaves)))
    body = RegionBody(program, 0)
    leaf_of = dict(CallingConvention.of(program, body.inputs).tensors)
    numbers = [leaf_of[node] for node in body.inputs]

    def recorded(leaves: list[torch.Tensor], separate: set[int]) -> RecordedInputs:
        inputs = [leaves[number] for number in numbers]
        return recorded_inputs(body, inputs, {numbers.index(leaf) for leaf in separate})

    def together(leaves: list[torch.Tensor], separate: set[int]) -> set[int]:
        return {numbers[position] for position in recorded(leaves, separate).together}

    assert together(leaves, set()) == {0, 1, 2, 3, 5, 6, 7}, "not what indices are computed from"
    assert together(leaves, {2, 6}) == {0, 1, 3, 5, 7}
    assert together(leaves, {0, 2, 3}) == {5, 6, 7}, "one alone has its own memory anyway"
    leaves[1] = leaves[3][:32]
    leaves[2] = torch.ones(3, device=device)
    assert together(leaves, set()) == {0, 1, 3, 5, 6, 7}, "not what is small"
    assert {numbers[position] for position in recorded(leaves, set()).tangled} == {1, 3}
    leaves[3] = leaves[0][16:]
    assert together(leaves, set()) == {5, 6, 7}, "not what shares memory with what is written"
    leaves[5] = leaves[6]
    assert together(leaves, {0, 1, 3}) == {5, 6, 7}


def test_inputs_that_share_memory_are_as_far_from_it_as_no_other(device: torch.device) -> None:
    base = torch.ones(4096, device=device)
    inputs = [base[128 * n : 128 * n + 1024] for n in range(4)] + [base, torch.ones(64, device=device)]
    found = recorded_inputs(body_of(lambda *xs: sum(x.sum() for x in xs), *inputs), inputs, separate=())
    assert found.together == {0, 1, 2, 3, 4, 5}
    assert found.tangled == {0, 1, 2, 3, 4}
    tensors = [tensor for tensor in found.tensors if tensor is not None]
    assert len({tensor.data_ptr() - given.data_ptr() for tensor, given in zip(tensors, inputs, strict=True)}) == 6


def node(*addresses: int) -> RecordedNode:
    return RecordedNode("kernel", "k", 0, b"".join(address.to_bytes(8, "little") for address in addresses))


def test_pointers_into_memory_that_overlaps_in_one_recording() -> None:
    first = [Extent(0x1000, 0x400), Extent(0x1200, 0x400), Extent(0x5000, 64)]
    second = [Extent(0x8000, 0x400), Extent(0x9000, 0x400), Extent(0x6000, 64)]
    # the same address in the first recording: of the one tensor in its middle, and where the other begins
    recorded = node(0x1200, 0x1200, 0x5010, 0x1300, 77), node(0x8200, 0x9000, 0x6010, 0x1300, 77)
    assert pointer_words([recorded[0]], [recorded[1]], first, second, together={0, 1}) == [
        Word(node=0, offset=0, slot=0, delta=0x200),
        Word(node=0, offset=8, slot=1, delta=0),
        Word(node=0, offset=16, slot=2, delta=0x10),
    ]


def test_pointers_into_memory_that_overlaps_in_both_recordings() -> None:
    first = [Extent(0x1000, 0x400), Extent(0x1200, 0x400), Extent(0x5000, 64)]
    second = [Extent(0x800, 0x400), Extent(0x840, 0x400), Extent(0x6000, 64)]
    moved = [(0x1010, 0x810), (0x13FF, 0xBFF), (0x1400, 0xC00), (0x1210, 0x850), (0x5010, 0x6010), (77, 77)]
    recorded = [node(*(one for one, _ in moved))], [node(*(other for _, other in moved))]
    assert pointer_words(*recorded, first, second, tangled={0, 1}) == [
        Word(node=0, offset=0, slot=0, delta=0x10),
        Word(node=0, offset=8, slot=0, delta=0x3FF),
        Word(node=0, offset=24, slot=1, delta=0x10),
        Word(node=0, offset=32, slot=2, delta=0x10),
    ]
    alike = Extent(0x1004, 0x400), Extent(0x804, 0x400)  # as far from one recording to the other as the first
    words = pointer_words(*recorded, [*first, alike[0]], [*second, alike[1]], tangled={0, 1, 3})
    assert [word.slot for word in words] == [1, 2], "neither is found"


def test_results_of_inputs_that_share_memory(device: torch.device) -> None:
    """As the three parts of one projection, of which attention makes a batch each."""
    fast = pygraph.jit(lambda q, k, v: (q @ k.mT) @ v + q)
    for _ in range(3):
        parts = torch.randn(2, 8, 3, 8).to(device).unbind(2)
        assert torch.equal(fast(*parts), (parts[0] @ parts[1].mT) @ parts[2] + parts[0])
    assert fast.explain().to_dict()["memory"]["copied"] == 0


@pytest.mark.parametrize("way", ["patch", "copy"])
def test_results(device: torch.device, way: str) -> None:
    make = pygraph.graphify if way == "copy" else lambda fn: pygraph.graphify(pygraph.indirect(pygraph.devicify(fn)))
    fast = make(lambda a, b, c: (a @ b + c, torch.where(a > 0, b, c)))
    for _ in range(3):
        a, b, c = (torch.randn(8, 8).to(device) for _ in range(3))
        assert all(map(torch.equal, fast(a, b, c), (a @ b + c, torch.where(a > 0, b, c))))
    assert fast.explain().to_dict()["memory"]["copied"] == (3 * 256 if way == "copy" else 0)


def test_an_input_whose_pointer_does_not_change_lies_apart(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a proof fails, what is copied and what is not is found out with each in memory of its own."""
    works, together = patchable._works, list[frozenset[int]]()

    def note(*args: Any) -> RecordedInputs:
        found = recorded_inputs(*args)
        together.append(found.together)
        return found

    def refuse(proof: Any, patched: frozenset[int]) -> tuple[bool, str | None]:
        return (False, None) if 1 in patched else works(proof, patched)

    monkeypatch.setattr(discovery, "recorded_inputs", note)
    monkeypatch.setattr(patchable, "_works", refuse)
    fast = pygraph.graphify(pygraph.indirect(pygraph.devicify(lambda a, b, c: a * b + c)))
    for _ in range(3):
        a, b, c = (torch.randn(64).to(device) for _ in range(3))
        assert torch.equal(fast(a, b, c), a * b + c)
    assert together == [{0, 1, 2}, set()]
    assert fast.explain().to_dict()["memory"]["copied"] == 256


def test_scratch_memory_behind_many_results_is_watched_in_turns(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, watched = patchable._works, list[tuple[Any, int, bool]]()

    def note(proof: Any, patched: frozenset[int], compares: bool = True) -> tuple[bool, str | None]:
        watched.append((proof.watched, len(patched), compares))
        return works(proof, patched, compares)

    def discovered(self: Any, *args: Any) -> None:
        original(self, *args)
        self.memory = [dataclasses.replace(memory, scratch=100) for memory in self.memory]

    original = patchable.Discovery.__init__
    monkeypatch.setattr(patchable.Discovery, "__init__", discovered)
    monkeypatch.setattr(patchable, "_works", note)
    monkeypatch.setattr(patchable, "_MOST_SCRATCH", 250)
    fast = pygraph.graphify(pygraph.indirect(pygraph.devicify(lambda x: (x + 1, x * 2, x - 3, x.sin(), x.cos()))))
    x = torch.randn(8).to(device)
    assert all(map(torch.equal, fast(x), (x + 1, x * 2, x - 3, x.sin(), x.cos())))
    assert watched == [({0, 1}, 3, False), ({2, 3}, 3, False), ({4}, 2, False), ((), 6, True)]
    assert fast.explain().to_dict()["memory"]["copied"] == 0
