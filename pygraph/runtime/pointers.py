"""Pointers and numbers in the parameters of a graph's nodes: found by comparing two recordings, and changed.

Nothing here knows a device: recordings are bytes. A word is a pointer of a slot if, in two recordings with the slot's
memory at two addresses, it stood at the same distance from the start of that memory both times. Uninitialised padding
that merely looks like an address does not move along, and is left alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pygraph.runtime.recorded_graph import RecordedGraph, RecordedNode


@dataclasses.dataclass(frozen=True)
class Extent:
    """The memory of one slot during a recording.

    Attributes:
        start: Address of the first byte.
        size: Bytes.
        first_op: The operation that allocated it. Earlier nodes may hold addresses in this range that belonged to
            memory freed since, so their words are not this slot's. Zero for memory that was there before.
    """

    start: int
    size: int
    first_op: int = 0


@dataclasses.dataclass(frozen=True)
class Word:
    """Eight parameter bytes of a node that hold a slot's address plus ``delta``."""

    node: int
    offset: int
    slot: int
    delta: int


@dataclasses.dataclass(frozen=True)
class ValueWord:
    """Parameter bytes of a node that hold a number, as a C value of ``ctype``."""

    node: int
    offset: int
    slot: int
    dtype: str


def same_structure(first: Sequence[RecordedNode], second: Sequence[RecordedNode]) -> bool:
    """Whether two recordings are of the same nodes, so that their bytes can be compared."""
    return len(first) == len(second) and all(
        (a.kind, a.name, a.op, len(a.params)) == (b.kind, b.name, b.op, len(b.params))
        for a, b in zip(first, second, strict=True)
    )


def pointer_words(
    first: Sequence[RecordedNode],
    second: Sequence[RecordedNode],
    extents_first: Sequence[Extent],
    extents_second: Sequence[Extent],
    together: Collection[int] = (),
    tangled: Collection[int] = (),
) -> list[Word]:
    """The words of every slot, given where its memory was in each of two recordings of the same structure.

    Args:
        first: Nodes of one recording.
        second: Nodes of the other; ``same_structure(first, second)`` must hold.
        extents_first: Per slot, its memory in the first recording. It overlaps no other, but for ``together``.
        extents_second: Per slot, its memory in the second recording.
        together: Slots whose memory may overlap in the first recording; in the second one it overlaps no other.
        tangled: Slots whose memory may overlap in both. Where two of them are as far from one recording to the other,
            no word of either is found.

    Example:
        >>> node = lambda address: RecordedNode("kernel", "k", 0, address.to_bytes(8, "little"))
        >>> pointer_words([node(0x1010)], [node(0x2010)], [Extent(0x1000, 64)], [Extent(0x2000, 64)])
        [Word(node=0, offset=0, slot=0, delta=16)]
    """
    others = [slot for slot in range(len(extents_first)) if slot not in together and slot not in tangled]
    words = _pointer_words(first, second, extents_first, extents_second, others)
    words += _pointer_words(second, first, extents_second, extents_first, together)
    words += _words_by_distance(first, second, extents_first, extents_second, tangled)
    return sorted(words, key=lambda word: (word.node, word.offset))


def _pointer_words(
    first: Sequence[RecordedNode],
    second: Sequence[RecordedNode],
    extents_first: Sequence[Extent],
    extents_second: Sequence[Extent],
    slots: Iterable[int],
) -> list[Word]:
    """The words of slots whose memory does not overlap in the first recording."""
    order = sorted((slot for slot in slots if extents_first[slot].size), key=lambda slot: extents_first[slot].start)
    if not order:
        return []
    starts = np.array([extents_first[slot].start for slot in order], dtype=np.uint64)
    words: list[Word] = []
    for index, op, values_a, values_b in _values(first, second):
        positions = np.searchsorted(starts, values_a, side="right")
        for word in np.nonzero((positions > 0) & (values_a != values_b))[0]:
            slot = order[int(positions[word]) - 1]
            extent = extents_first[slot]
            delta = int(values_a[word]) - extent.start
            in_range = delta < extent.size
            moved_along = int(values_b[word]) - extents_second[slot].start == delta
            if in_range and moved_along and (op >= extent.first_op or extent.first_op == 0):
                words.append(Word(index, int(word) * 8, slot, delta))
    return words


def _words_by_distance(
    first: Sequence[RecordedNode],
    second: Sequence[RecordedNode],
    extents_first: Sequence[Extent],
    extents_second: Sequence[Extent],
    slots: Iterable[int],
) -> list[Word]:
    """The words of slots that are told from each other by how far they have moved between the recordings alone."""
    by_distance: dict[int, list[int]] = {}
    for slot in slots:
        distance = (extents_second[slot].start - extents_first[slot].start) % 2**64
        by_distance.setdefault(distance, []).append(slot)
    of = {distance: found[0] for distance, found in by_distance.items() if len(found) == 1}
    if not of:
        return []
    distances = np.array(sorted(of), dtype=np.uint64)
    words: list[Word] = []
    for index, _, values_a, values_b in _values(first, second):
        moved = values_b - values_a  # modulo 2**64
        for word in np.nonzero(np.isin(moved, distances))[0]:
            slot = of[int(moved[word])]
            delta = int(values_a[word]) - extents_first[slot].start
            if 0 <= delta < extents_first[slot].size:
                words.append(Word(index, int(word) * 8, slot, delta))
    return words


def _values(
    first: Sequence[RecordedNode], second: Sequence[RecordedNode]
) -> Iterator[tuple[int, int, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]:
    """The number of each node, its operation, and the words of its parameters in both recordings."""
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        count = len(a.params) // 8
        values_a, values_b = (np.frombuffer(node.params, dtype="<u8", count=count) for node in (a, b))
        yield index, a.op, values_a, values_b


def value_words(
    first: Sequence[RecordedNode],
    second: Sequence[RecordedNode],
    op: int,
    slot: int,
    encoded_first: bytes,
    encoded_second: bytes,
    dtype: str,
) -> list[ValueWord]:
    """The words of operation ``op`` that hold a number: ``encoded_first`` in one recording, then ``encoded_second``."""
    width = len(encoded_first)
    found: list[ValueWord] = []
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        if a.op != op:
            continue
        for offset in range(0, len(a.params) - width + 1, width):
            here = slice(offset, offset + width)
            if a.params[here] == encoded_first and b.params[here] == encoded_second:
                found.append(ValueWord(index, offset, slot, dtype))
    return found


_CTYPES: dict[str, Any] = {
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "int64": ctypes.c_int64,
    "int32": ctypes.c_int32,
    "int16": ctypes.c_int16,
    "int8": ctypes.c_int8,
    "uint8": ctypes.c_uint8,
    "bool": ctypes.c_bool,
}

LIVE_DTYPES = frozenset(_CTYPES)
"""Names of the dtypes in which a number can be a kernel's parameter that changes."""


_REALS = (ctypes.c_float, ctypes.c_double, ctypes.c_bool)


def _encoded(ctype: Any, number: float) -> bytes:
    """The bytes of a C value of ``ctype``; an integer type drops the fraction, as eager does.

    Raises:
        OverflowError: An integer that has been computed is none of 64 bits; or a ValueError, as eager has it.
    """
    if type(number) is int and not -(1 << 63) <= number < 1 << 63:
        torch.zeros((), device="cpu").mul(number)  # raises what operations of torch's raise
    return bytes(ctype(number if ctype in _REALS else int(number)))


class Patcher:
    """Writes new addresses and numbers into a graph's nodes; only what changed since the last time is sent.

    What was sent last is read from the parameter bytes themselves, so that native code can share the work: a slot is
    unchanged if `synced` is set and its first cell holds its address already.

    Args:
        graph: The recorded graph.
        words: Its pointer words, of slots ``0 … slots - 1``.
        values: Its number words, of numbers ``0 … numbers - 1``.
        slots: How many pointer slots there are.
        numbers: How many numbers there are.

    Attributes:
        cells: Per slot, where its words are in memory and what is added to its address there.
        slot_nodes: Per slot, the nodes to send when it changes.
        number_cells: Per number, where its bytes are in memory and their dtype.
        number_nodes: Per number, the nodes to send when it changes.
        synced: Nonzero if the graph has what the cells hold.
    """

    def __init__(
        self,
        graph: RecordedGraph,
        words: Sequence[Word],
        values: Sequence[ValueWord],
        slots: int,
        numbers: int,
    ) -> None:
        self._graph = graph
        self.cells: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
        self.slot_nodes: list[tuple[int, ...]] = [()] * slots
        self.number_cells: list[list[tuple[int, str]]] = [[] for _ in range(numbers)]
        self.number_nodes: list[tuple[int, ...]] = [()] * numbers
        self.synced = ctypes.c_int64(0)
        for word in words:
            self.cells[word.slot].append((graph.params_address(word.node) + word.offset, word.delta))
            self.slot_nodes[word.slot] = tuple(dict.fromkeys((*self.slot_nodes[word.slot], word.node)))
        for value in values:
            address = graph.params_address(value.node) + value.offset
            self.number_cells[value.slot].append((address, value.dtype))
            self.number_nodes[value.slot] = (*self.number_nodes[value.slot], value.node)
        self._views = [[(ctypes.c_uint64.from_address(a), delta) for a, delta in cells] for cells in self.cells]
        self._number_views = [
            [((ctypes.c_char * ctypes.sizeof(_CTYPES[dtype])).from_address(a), _CTYPES[dtype]) for a, dtype in cells]
            for cells in self.number_cells
        ]

    @property
    def patched_nodes(self) -> int:
        """The number of nodes that the host changes."""
        return len({node for nodes in (*self.slot_nodes, *self.number_nodes) for node in nodes})

    def __call__(self, addresses: Sequence[int], numbers: Sequence[float]) -> None:
        """Make the next replay use ``addresses[slot]`` and ``numbers[i]``."""
        synced = self.synced.value
        self.synced.value = 0  # what an interruption in the middle leaves is not known
        dirty: set[int] = set()
        for cells, nodes, address in zip(self._views, self.slot_nodes, addresses, strict=True):
            if cells and not (synced and cells[0][0].value == address + cells[0][1]):
                for cell, delta in cells:
                    cell.value = address + delta
                dirty.update(nodes)
        for cells, nodes, number in zip(self._number_views, self.number_nodes, numbers, strict=True):
            for cell, ctype in cells:
                # Compared as bytes: 0.0 == -0.0, but they differ there.
                encoded = _encoded(ctype, number)
                if not synced or cell.raw != encoded:
                    cell.raw = encoded
                    dirty.update(nodes)
        for node in dirty:
            self._graph.commit(node)
        self.synced.value = 1

    def forget(self) -> None:
        """Send everything the next time, as after an error in the middle."""
        self.synced.value = 0
