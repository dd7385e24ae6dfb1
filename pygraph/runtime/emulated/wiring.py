"""Nodes of our own in a graph of the emulated device: updates of other nodes, a pointer table, and copies.

They read their addresses from their parameter bytes, as the kernels in `pygraph.runtime.cuda.wiring` do.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from typing import Final, Protocol

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.emulated import tensors as memory
from pygraph.runtime.recorded_graph import NodeMechanism, RecordedNode, Wiring

LOADS_POINTERS: Final = frozenset({"aten::add.out", "aten::mul.out", "aten::relu", "aten::sin.out", "aten::sub.out"})
"""Operations whose kernels can load their pointers from a table: they behave as Triton kernels do."""


class NodeFunction(Protocol):
    """The function of a node, which reads its parameter bytes."""

    def run(self, params: bytes) -> None:
        """Run on the addresses in the bytes."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class _Update:
    """Writes each value into parameter bytes of other nodes and into the table."""

    all_params: list[bytes]
    updates: tuple[tuple[int, int, int], ...]  # value, node, offset
    entries: tuple[tuple[int, int], ...]  # value, address in the table

    def run(self, params: bytes) -> None:
        for value, node, offset in self.updates:
            changed = bytearray(self.all_params[node])
            changed[offset : offset + 8] = params[8 * value : 8 * value + 8]
            self.all_params[node] = bytes(changed)
        for value, address in self.entries:
            memory.allocator.check_range(address, 8)
            ctypes.memmove(address, params[8 * value : 8 * value + 8], 8)


@dataclasses.dataclass(frozen=True, eq=False)
class _Copy:
    """Copies between fixed addresses and values."""

    copies: tuple[tuple[int, int, int], ...]  # value, fixed address, bytes
    out: bool

    def run(self, params: bytes) -> None:
        for value, fixed, nbytes in self.copies:
            (moving,) = struct.unpack_from("<Q", params, 8 * value)
            for address in (fixed, moving):
                memory.allocator.check_range(address, nbytes)
            source, target = (fixed, moving) if self.out else (moving, fixed)
            ctypes.memmove(target, source, nbytes)


@dataclasses.dataclass(frozen=True, eq=False)
class _Loading:
    """A kernel whose pointers at ``offsets`` are in a table, of which its parameters hold the entries' addresses."""

    kernel: NodeFunction
    offsets: tuple[int, ...]

    def run(self, params: bytes) -> None:
        loaded = bytearray(params)
        for offset in self.offsets:
            (entry,) = struct.unpack_from("<Q", params, offset)
            memory.allocator.check_range(entry, 8)
            loaded[offset : offset + 8] = ctypes.string_at(entry, 8)
        self.kernel.run(bytes(loaded))


def mechanisms(node: RecordedNode) -> frozenset[NodeMechanism]:
    """The ways in which the pointers of a node can be changed."""
    if node.kind != "kernel":
        return frozenset({"host"})
    return frozenset({"host", "device", "table"} if node.name in LOADS_POINTERS else {"host", "device"})


@dataclasses.dataclass
class Added:
    """Nodes to add, before all others and after; the table that they use; and nodes that the host must not send."""

    first: list[tuple[RecordedNode, NodeFunction]]
    last: list[tuple[RecordedNode, NodeFunction]]
    table: torch.Tensor | None
    updated: frozenset[int]


def add_wiring(
    nodes: tuple[RecordedNode, ...], params: list[bytes], functions: list[NodeFunction], wiring: Wiring
) -> Added:
    """Make the nodes of a wiring; ``functions`` and ``params`` of kernels that load from the table are replaced."""
    for _, node, _ in (*wiring.updates, *wiring.loads):
        if nodes[node].kind != "kernel":
            raise CaptureError(f"a {nodes[node].name} node cannot be updated by the device")
    first: list[tuple[RecordedNode, NodeFunction]] = []
    last: list[tuple[RecordedNode, NodeFunction]] = []
    table = None
    entries: dict[int, int] = {}
    if wiring.loads:
        values = dict.fromkeys(value for value, _, _ in wiring.loads)
        table = memory.allocate((8 * len(values),), (1,), torch.uint8, own=False)
        entries = {value: table.data_ptr() + 8 * index for index, value in enumerate(values)}
        for node in dict.fromkeys(node for _, node, _ in wiring.loads):
            words = [(value, offset) for value, other, offset in wiring.loads if other == node]
            changed = bytearray(params[node])
            for value, offset in words:
                struct.pack_into("<Q", changed, offset, entries[value])
            params[node] = bytes(changed)
            functions[node] = _Loading(functions[node], tuple(offset for _, offset in words))
    blank = bytes(8 * wiring.values)
    if wiring.updates or wiring.loads:
        update = _Update(params, wiring.updates, tuple(entries.items()))
        first.append((RecordedNode("kernel", "pygraph_update", -1, blank), update))
    if wiring.copies_in:
        first.append((RecordedNode("kernel", "pygraph_copy_in", -1, blank), _Copy(wiring.copies_in, out=False)))
    if wiring.copies_out:
        last.append((RecordedNode("kernel", "pygraph_copy_out", -1, blank), _Copy(wiring.copies_out, out=True)))
    return Added(first, last, table, frozenset(node for _, node, _ in wiring.updates))
