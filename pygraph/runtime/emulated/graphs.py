"""Recording a graph of the emulated device, and the graph itself: patched through its nodes' bytes, and replayed."""

# What keeps dispatch modes of the user's out of a replay is private in torch.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from typing_extensions import override  # torch depends on it

from pygraph.ir.selections import Mechanism
from pygraph.runtime.emulated import device_lock, launches
from pygraph.runtime.emulated import tensors as memory
from pygraph.runtime.emulated.launches import Launch
from pygraph.runtime.emulated.memory import EmulatedPool
from pygraph.runtime.emulated.nodes import node_of
from pygraph.runtime.emulated.wiring import NodeFunction, add_wiring, mechanisms
from pygraph.runtime.graph_generators import GraphGenerator, drawing
from pygraph.runtime.recorded_graph import NodeMechanism, RecordedGraph, RecordedNode, Wiring


class Recorder:
    """Turns launches into nodes, and saves the memory that they change."""

    def __init__(self, generators: Sequence[GraphGenerator] = ()) -> None:
        self._generators = {generator.own._cdata for generator in generators}  # pyright: ignore
        self.nodes: list[RecordedNode] = []
        self.functions: list[NodeFunction] = []
        self.refused: RuntimeError | None = None
        self.op = -1
        self._outer: Recorder | None = None
        self._saved: dict[tuple[int, int], bytes] = {}

    def mark(self, op: int) -> None:
        """Give nodes that are recorded from now on this operation's number."""
        self.op = op

    def inner(self) -> Recorder:
        """A recorder of a part of a branch or a loop, whose memory is restored with that of this one."""
        inner = Recorder()
        inner.op, inner._generators, inner._saved, inner._outer = self.op, self._generators, self._saved, self
        return inner

    def add(self, node: tuple[RecordedNode, NodeFunction]) -> None:
        """Add a node."""
        self.nodes.append(node[0])
        self.functions.append(node[1])

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """Save the memory of these tensors, unless the recording has allocated it."""
        # Inputs too: some kernels write arguments that their schema does not name (statistics of batch norm).
        for tensor in tensors:
            address = tensor.data_ptr()
            nbytes = memory.span_bytes(tensor.shape, tensor.stride(), tensor.dtype)
            segment = memory.allocator.segment_at(address, nbytes)
            if not nbytes or segment is None or segment.owned[segment.granules(address, 1)].any():
                continue
            self._saved.setdefault((address, nbytes), ctypes.string_at(address, nbytes))

    def after(self, launch: Launch) -> None:
        """Add a node for a launch."""
        self.add(node_of(launch, self.op))

    def check_generator(self, generator: torch.Generator) -> None:
        """Refuse to draw from a generator of which the graph does not know, as CUDA does."""
        if generator._cdata not in self._generators:  # pyright: ignore
            raise self.refuse("a draw from a generator that is not registered with the graph")

    def refuse(self, op: str) -> RuntimeError:
        """The error for an operation that cannot be recorded; the recording is void after it."""
        self.refused = RuntimeError(f"emu error: operation not permitted when stream is capturing: {op}")
        if self._outer is not None:
            self._outer.refused = self.refused
        return self.refused

    def undo(self) -> None:
        """Restore the memory that the recording did not allocate."""
        for (address, _), data in reversed(self._saved.items()):
            ctypes.memmove(address, data, len(data))


class EmulatedGraph(RecordedGraph):
    """A recorded graph of the emulated device."""

    def __init__(
        self, nodes: Sequence[RecordedNode], functions: list[NodeFunction], pool: EmulatedPool, replayed: list[int]
    ) -> None:
        self.nodes = tuple(nodes)
        self._functions: list[NodeFunction] | None = functions
        self._order = list(range(len(functions)))
        self._params = [node.params for node in nodes]
        self._updated: frozenset[int] = frozenset()
        self._table: torch.Tensor | None = None
        self._buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._replayed = replayed
        self._give_back = weakref.finalize(self, memory.allocator.release, pool)
        self._give_back.atexit = False

    @override
    def params_address(self, node: int) -> int:
        if node not in self._buffers:
            params = self.nodes[node].params
            self._buffers[node] = (ctypes.c_char * len(params)).from_buffer_copy(params)
        return ctypes.addressof(self._buffers[node])

    @override
    def commit(self, node: int) -> None:
        self._check_unreleased("commit")
        if node in self._updated:
            raise RuntimeError("emu error: a node that the device updates was sent without uploading the graph again")
        self.params_address(node)
        self._params[node] = self._buffers[node].raw
        launches.counters.patches += 1

    @override
    def restore(self) -> None:
        self._check_unreleased("restore")
        for node, buffer in self._buffers.items():
            buffer.raw = self.nodes[node].params
        self._params[:] = [node.params for node in self.nodes]

    @override
    def mechanisms(self, node: int, request: Mechanism = "auto") -> frozenset[NodeMechanism]:
        return mechanisms(self.nodes[node])

    @override
    def wire(self, wiring: Wiring) -> list[list[tuple[int, int]]]:
        functions = self._check_unreleased("wire")
        self._params[:] = [node.params for node in self.nodes]  # a new executable of what was recorded
        added = add_wiring(self.nodes, self._params, functions, wiring)
        self._table, self._updated = added.table, added.updated
        locations: list[list[tuple[int, int]]] = [[] for _ in range(wiring.values)]
        for nodes, front in ((added.first, True), (added.last, False)):
            for node, function in nodes:
                index = len(functions)
                functions.append(function)
                self._params.append(node.params)
                self.nodes += (node,)
                self._order.insert(0 if front else index, index)
                for value, found in enumerate(locations):
                    found.append((index, 8 * value))
        return locations

    @override
    def replay(self) -> None:
        functions = self._check_unreleased("replay")
        with device_lock.lock:
            self._replay(functions)

    def _replay(self, functions: list[NodeFunction]) -> None:
        if launches.recorder is not None:
            raise launches.recorder.refuse("graph launch")
        launches.counters.launches += 1
        launches.counters.replays += 1
        self._replayed[0] += len(functions)
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),  # pyright: ignore
            torch._C._AutoDispatchBelowAutograd(),  # pyright: ignore
        ):
            self.failed = True
            with drawing(self.generators):
                for index in self._order:
                    functions[index].run(self._params[index])
            self.failed = False

    @override
    def release(self, *keep: object) -> None:
        self._functions = None
        self._give_back()

    def _check_unreleased(self, call: str) -> list[NodeFunction]:
        if self._functions is None:
            raise RuntimeError(f"{call}(): the graph has been released")
        return self._functions
