"""Discovery and patching on synthetic parameter bytes: no device is involved."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pygraph.runtime.pointers import Extent, Patcher, ValueWord, Word, pointer_words, same_structure, value_words
from pygraph.runtime.recorded_graph import RecordedGraph, RecordedNode


def node(params: bytes, op: int = 0, name: str = "k") -> RecordedNode:
    return RecordedNode("kernel", name, op, params)


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


class Bytes(RecordedGraph):
    """A graph that is nothing but its parameters."""

    def __init__(self, nodes: list[RecordedNode]) -> None:
        self.nodes = tuple(nodes)
        self.buffers = [ctypes.create_string_buffer(n.params, len(n.params)) for n in nodes]
        self.committed: list[int] = []

    def params_address(self, node: int) -> int:
        return ctypes.addressof(self.buffers[node])

    def commit(self, node: int) -> None:
        self.committed.append(node)

    def restore(self) -> None:
        raise NotImplementedError

    def replay(self) -> None:
        raise NotImplementedError

    def release(self, *keep: object) -> None:
        raise NotImplementedError


# ---- two recordings --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recordings:
    """Two recordings of the same nodes, and the words that are pointers in them."""

    first: list[RecordedNode]
    second: list[RecordedNode]
    extents: list[Extent]
    extents_again: list[Extent]
    expected: list[Word]


@st.composite
def recordings(draw: st.DrawFn) -> Recordings:
    """Slots at two places, and nodes with pointers into them, plain numbers, and padding that looks like pointers."""
    sizes = draw(st.lists(st.integers(0, 4096), min_size=1, max_size=5))
    places: list[list[Extent]] = []
    for base in (0x7F00_0000_0000, 0x7E00_0000_0000):
        order = draw(st.permutations(range(len(sizes))))
        at, starts = base, [0] * len(sizes)
        for slot in order:
            at += draw(st.integers(0, 1024)) * 8
            starts[slot] = at
            at += sizes[slot]
        places.append([Extent(start, size) for start, size in zip(starts, sizes, strict=True)])
    extents, again = places
    first, second, expected = [], [], []
    for number in range(draw(st.integers(1, 4))):
        a, b = [], []
        for position in range(draw(st.integers(0, 6))):
            slot = draw(st.integers(0, len(sizes) - 1))
            kind = draw(st.sampled_from(("pointer", "number", "stale", "random", "past the end")))
            if kind == "pointer" and sizes[slot]:
                delta = draw(st.integers(0, sizes[slot] - 1))
                a.append(extents[slot].start + delta)
                b.append(again[slot].start + delta)
                expected.append(Word(number, position * 8, slot, delta))
            elif kind == "stale":  # the same address both times, whoever owns it now
                a.append(extents[slot].start + draw(st.integers(0, 64)))
                b.append(a[-1])
            elif kind == "past the end":  # some address that moved, but not along with its owner
                a.append(extents[slot].start + sizes[slot])
                b.append(again[slot].start + sizes[slot] + 1)
            elif kind == "number":
                a.append(draw(st.integers(0, 2**32)))
                b.append(a[-1])
            else:
                a.append(draw(st.integers(0, 2**40)))
                b.append(draw(st.integers(0, 2**40)))
        tail = bytes(draw(st.integers(0, 7)))
        first.append(node(words(*a) + tail, number))
        second.append(node(words(*b) + tail, number))
    return Recordings(first, second, extents, again, expected)


@given(recordings())
def test_exactly_the_words_that_moved_along_are_found(r: Recordings) -> None:
    assert same_structure(r.first, r.second)
    assert pointer_words(r.first, r.second, r.extents, r.extents_again) == r.expected


@given(recordings(), st.lists(st.integers(0x1000, 2**47), min_size=5, max_size=5))
def test_patching_moves_every_pointer_and_nothing_else(r: Recordings, addresses: list[int]) -> None:
    graph = Bytes(r.first)
    slots = len(r.extents)
    patcher = Patcher(graph, r.expected, [], slots, 0)
    patcher(addresses[:slots], [])
    pointers = {(w.node, w.offset): w for w in r.expected}
    for index, (buffer, original) in enumerate(zip(graph.buffers, r.first, strict=True)):
        for offset in range(0, len(original.params) // 8 * 8, 8):
            (value,) = struct.unpack_from("<Q", buffer.raw, offset)
            word = pointers.get((index, offset))
            recorded = struct.unpack_from("<Q", original.params, offset)[0]
            assert value == (recorded if word is None else addresses[word.slot] + word.delta)
    assert sorted(graph.committed) == sorted({w.node for w in r.expected})
    assert patcher.patched_nodes == len({w.node for w in r.expected})


@given(recordings(), st.data())
def test_only_changed_slots_are_sent(r: Recordings, data: st.DataObject) -> None:
    graph = Bytes(r.first)
    slots = len(r.extents)
    patcher = Patcher(graph, r.expected, [], slots, 0)
    addresses = [0x1000 * (slot + 1) for slot in range(slots)]
    patcher(addresses, [])
    graph.committed.clear()
    patcher(addresses, [])
    assert graph.committed == []
    changed = data.draw(st.integers(0, slots - 1))
    addresses[changed] += 0x100000
    patcher(addresses, [])
    assert sorted(graph.committed) == sorted({w.node for w in r.expected if w.slot == changed})
    graph.committed.clear()
    patcher.forget()
    patcher(addresses, [])
    assert sorted(graph.committed) == sorted({w.node for w in r.expected})


# ---- single rules ----------------------------------------------------------------------------------------------


def test_padding_that_looks_like_a_pointer_is_left_alone() -> None:
    """The address of the slot's memory, in both recordings: something that was left there."""
    first, second = [node(words(0x1000, 0x1000))], [node(words(0x2000, 0x1000))]
    assert pointer_words(first, second, [Extent(0x1000, 64)], [Extent(0x2000, 64)]) == [Word(0, 0, 0, 0)]


def test_a_view_at_an_offset() -> None:
    first, second = [node(words(0x1018))], [node(words(0x2018))]
    assert pointer_words(first, second, [Extent(0x1000, 64)], [Extent(0x2000, 64)]) == [Word(0, 0, 0, 0x18)]


@pytest.mark.parametrize("delta", [-1, 64])
def test_a_word_outside_the_memory_is_no_pointer(delta: int) -> None:
    first, second = [node(words(0x1000 + delta))], [node(words(0x2000 + delta))]
    assert pointer_words(first, second, [Extent(0x1000, 64)], [Extent(0x2000, 64)]) == []


def test_memory_that_did_not_move_has_no_words() -> None:
    """Two recordings at one address say nothing."""
    same = [node(words(0x1000))]
    assert pointer_words(same, same, [Extent(0x1000, 64)], [Extent(0x1000, 64)]) == []


def test_a_word_at_an_odd_place_is_not_looked_at() -> None:
    """Arguments start at multiples of eight."""
    first, second = [node(bytes(4) + words(0x1000))], [node(bytes(4) + words(0x2000))]
    assert pointer_words(first, second, [Extent(0x1000, 64)], [Extent(0x2000, 64)]) == []


def test_empty_memory_has_no_words() -> None:
    first, second = [node(words(0x1000))], [node(words(0x2000))]
    assert pointer_words(first, second, [Extent(0x1000, 0)], [Extent(0x2000, 0)]) == []
    assert pointer_words(first, second, [], []) == []


def test_neighbours_are_told_apart() -> None:
    """One slot ends where the next starts; their order differs between the recordings."""
    first = [node(words(0x1000, 0x103F, 0x1040))]
    second = [node(words(0x2040, 0x207F, 0x2000))]
    found = pointer_words(
        first, second, [Extent(0x1000, 64), Extent(0x1040, 64)], [Extent(0x2040, 64), Extent(0x2000, 64)]
    )
    assert found == [Word(0, 0, 0, 0), Word(0, 8, 0, 63), Word(0, 16, 1, 0)]


@given(st.integers(0, 5), st.integers(0, 5))
def test_words_before_the_first_operation_are_somebody_elses(op: int, first_op: int) -> None:
    """Memory that was allocated in the recording may have had another owner before."""
    first, second = [node(words(0x1000), op)], [node(words(0x2000), op)]
    found = pointer_words(first, second, [Extent(0x1000, 64, first_op)], [Extent(0x2000, 64, first_op)])
    assert bool(found) == (op >= first_op)


@pytest.mark.parametrize(
    "other",
    [[], [node(bytes(8))], [node(bytes(16), 1)], [node(bytes(16), 0, "j")], [RecordedNode("memset", "k", 0, bytes(16))],
     [node(bytes(16)), node(bytes(16))]],
)  # fmt: skip
def test_other_structures(other: list[RecordedNode]) -> None:
    assert not same_structure([node(bytes(16))], other)
    assert same_structure([node(bytes(16))], [node(b"\xff" * 16)])


# ---- numbers ---------------------------------------------------------------------------------------------------

FORMATS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i", "int16": "<h", "int8": "<b", "uint8": "<B",
           "bool": "<?"}  # fmt: skip


@given(st.sampled_from(sorted(FORMATS)), st.binary(max_size=64), st.integers(0, 3), st.integers(0, 40))
def test_a_number_is_found_where_it_is(dtype: str, around: bytes, op: int, place: int) -> None:
    a, b = (struct.pack(FORMATS[dtype], value) for value in ((True, False) if dtype == "bool" else (87, 101)))
    around = bytes(byte for byte in around if byte not in (*a, *b))
    width = len(a)
    place = min(place, len(around)) // width * width
    first, second = (around[:place] + n + around[place:] for n in (a, b))
    nodes = [node(first, op), node(first, op + 1)], [node(second, op), node(second, op + 1)]
    assert value_words(*nodes, op, 7, a, b, dtype) == [ValueWord(0, place, 7, dtype)]
    assert value_words(*nodes, op + 2, 7, a, b, dtype) == []


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_a_patched_number_has_the_bytes_of_its_type(dtype: str) -> None:
    value: Any = True if dtype == "bool" else 42
    graph = Bytes([node(b"\xaa" * 24)])
    patcher = Patcher(graph, [], [ValueWord(0, 8, 0, dtype)], 0, 1)
    patcher([], [value])
    width = struct.calcsize(FORMATS[dtype])
    assert graph.buffers[0].raw == b"\xaa" * 8 + struct.pack(FORMATS[dtype], value) + b"\xaa" * (16 - width)
    assert graph.committed == [0]


@pytest.mark.parametrize("dtype", sorted(FORMATS))
@pytest.mark.parametrize("value", [2.75, -1.5, 0.25])
def test_a_float_loses_its_fraction_where_an_integer_is_held(dtype: str, value: float) -> None:
    """As in eager: ``x.fill_(2.75)`` of an integer tensor writes 2, of a mask True."""
    graph = Bytes([node(bytes(8))])
    Patcher(graph, [], [ValueWord(0, 0, 0, dtype)], 0, 1)([], [value])
    expected = torch.tensor(value).to(getattr(torch, dtype))
    assert graph.buffers[0].raw[: expected.element_size()] == bytes(expected.view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize(("before", "after"), [(0.0, -0.0), (1, 1.5), (1.0, float("nan")), (1.0, float("inf"))])
def test_numbers_that_compare_equal_but_differ_are_sent(before: float, after: float) -> None:
    """``0.0 == -0.0`` in Python, but not in a kernel."""
    graph = Bytes([node(bytes(8))])
    patcher = Patcher(graph, [], [ValueWord(0, 0, 0, "float64")], 0, 1)
    patcher([], [before])
    patcher([], [after])
    assert graph.buffers[0].raw == struct.pack("<d", after)
    graph.committed.clear()
    patcher([], [after])
    assert graph.committed == []


def test_one_number_in_two_places() -> None:
    graph = Bytes([node(bytes(16)), node(bytes(8))])
    patcher = Patcher(graph, [], [ValueWord(0, 8, 0, "int64"), ValueWord(1, 0, 0, "float32")], 0, 1)
    patcher([], [3])
    assert graph.buffers[0].raw == bytes(8) + struct.pack("<q", 3)
    assert graph.buffers[1].raw[:4] == struct.pack("<f", 3)
    assert sorted(graph.committed) == [0, 1]


@pytest.mark.parametrize("last", [0, 1])
def test_what_an_interrupted_patch_did_not_send_is_sent_later(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """The cells hold new values already then, which the graph may not have."""
    graph = Bytes([node(bytes(8)), node(bytes(8))])
    patcher = Patcher(graph, [Word(0, 0, 0, 0)], [ValueWord(1, 0, 0, "int64")], 1, 1)
    patcher([0x1000], [1])

    def commit(node: int) -> None:
        if node == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(graph, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            patcher([0x2000], [2])
    graph.committed.clear()
    patcher([0x2000], [2])
    assert sorted(graph.committed) == [0, 1]
