"""A captured CUDA graph: its nodes' parameters, its executable form, and its replays."""

# Parts of the allocator are reachable only through torch._C. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable

import torch

from pygraph.errors import CaptureError
from pygraph.ir.selections import Mechanism
from pygraph.runtime.cuda import annotations, captures
from pygraph.runtime.cuda.api import check, cu, function_pointer
from pygraph.runtime.cuda.dropout import draw_masks_alone
from pygraph.runtime.cuda.nodes import ChildParams, KernelParams, NodeParams, graph_nodes, node_params
from pygraph.runtime.cuda.pools import CudaPool, destroy_graph, random_lock, random_order
from pygraph.runtime.cuda.rewrite import replace_unpatchable
from pygraph.runtime.cuda.wiring import add_wiring
from pygraph.runtime.driver import Counters
from pygraph.runtime.graph_generators import drawing
from pygraph.runtime.launched_kernels import holder_of, kernel_of, rebuilt_kernel_of, why_not_loaded
from pygraph.runtime.recorded_graph import (
    LaunchInPython,
    NativeCommit,
    NodeMechanism,
    RecordedGraph,
    RecordedNode,
    Wiring,
)
from pygraph.runtime.trampoline import can_load


class CudaGraph(RecordedGraph):
    """A captured graph, its executable form, and writable copies of its nodes' parameters."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: CudaPool,
        counters: Counters,
        progress: list[tuple[int, int]],
        masks: list[tuple[int, int]],
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self._counters = counters
        self._wires: list[object] = []
        self._annotated: list[int] = []
        self._replayed = False
        raw = cu.CUgraph(graph.raw_cuda_graph())
        handles = graph_nodes(raw)
        ops = _ops_by_position(progress)
        if len(ops) != len(handles):
            raise CaptureError(f"{len(handles)} nodes were captured where {len(ops)} had been counted")
        handles = draw_masks_alone(raw, handles, masks, pool.device)
        handles = replace_unpatchable(raw, handles, pool.device)
        self._instantiate()
        self._params: list[NodeParams] = []
        nodes: list[RecordedNode] = []
        for handle, op in zip(handles, ops, strict=True):
            for params in node_params(handle):
                self._params.append(params)
                nodes.append(RecordedNode(params.kind, params.name, op, params.buffer.raw))
        self.nodes = tuple(nodes)
        # Triton and Inductor unload a kernel when nothing refers to it.
        self._kernels = [holder_of(params.function) for params in self._params if isinstance(params, KernelParams)]

    def _instantiate(self) -> None:
        assert self._graph is not None, "the graph has been released"
        self._graph.instantiate()
        self._executable = cu.CUgraphExec(self._graph.raw_cuda_graph_exec())

    def params_address(self, node: int) -> int:
        """Address of the writable copy."""
        return ctypes.addressof(self._params[node].buffer)

    def commit(self, node: int) -> None:
        """Send the writable copy to the executable graph."""
        self._params[node].commit(self._executable)
        self._counters.patches += 1

    def restore(self) -> None:
        """Instantiate again what was captured."""
        for params, node in zip(self._params, self.nodes, strict=True):
            ctypes.memmove(params.buffer, node.params, len(node.params))
            params.restore_template()
        self._instantiate()

    def mechanisms(self, node: int, request: Mechanism = "auto") -> frozenset[NodeMechanism]:
        """Kernels can be updated by the device, Triton's can load from a table; Inductor's only if asked."""
        params = self._params[node]
        found: set[NodeMechanism] = {"host"}
        if isinstance(params, KernelParams) and params.arguments:
            found.add("device")
            # Inductor makes so many kernels that compiling another of each costs more than a table gains.
            kernel = (rebuilt_kernel_of if request == "table" else kernel_of)(params.function)
            if kernel is not None and can_load(kernel):
                found.add("table")
        return frozenset(found)

    def why_not_loaded(self, node: int) -> str | None:
        """Why a Triton kernel has no trampoline."""
        params = self._params[node]
        return why_not_loaded(params.function, params.name) if isinstance(params, KernelParams) else None

    def wire(self, wiring: Wiring) -> list[list[tuple[int, int]]]:
        """Add kernels of our own to the captured graph and make its executable anew."""
        with torch.cuda.device(self._pool.device):  # kernels run in the context in which they were added
            return self._wire(wiring)

    def _wire(self, wiring: Wiring) -> list[list[tuple[int, int]]]:
        assert self._graph is not None, "the graph has been released"
        graph = cu.CUgraph(self._graph.raw_cuda_graph())
        added = add_wiring(graph, self._params, wiring, self._pool.device)
        self._wires += added.keep
        locations: list[list[tuple[int, int]]] = [[] for _ in range(wiring.values)]
        for params, values in added.nodes:
            for index, value in enumerate(values):
                locations[value].append((len(self._params), 8 * index))
            self._params.append(params)
            self.nodes += (RecordedNode(params.kind, params.name, -1, params.buffer.raw),)
        self._instantiate()
        self._pool.order()  # as after a replay, the graph's destruction waits for the stream
        stream = torch.cuda.current_stream(self._pool.device)
        # A graph whose nodes are updated by the device must be on the device before its first launch.
        check(cu.cuGraphUpload(self._executable, cu.CUstream(stream.cuda_stream)))
        return locations

    def annotate(self, note: Callable[[int], dict[str, str]]) -> None:
        """Have torch's annotations, where it has them, say what each node is; those of child graphs have no number."""
        annotations.forget(self._annotated)
        pairs = zip(self._params, self.nodes, strict=True)
        nodes = ((params.node, note(one.op)) for params, one in pairs if not isinstance(params, ChildParams))
        self._annotated = annotations.annotate(self._executable, nodes)

    def replay(self) -> None:
        """Launch on the current stream."""
        assert self._graph is not None, "the graph has been released"
        if self.draws or not self._replayed:
            self._replay_drawing(self._graph)
        else:
            self._graph.replay()
        self._counters.replays += 1
        self._counters.launches += 1

    def _replay_drawing(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay as a graph that may draw random numbers, and find out whether it does."""
        # Graphs of one generator read its seed from memory that torch 2.11 writes before each replay of any.
        generator = torch.cuda.default_generators[self._pool.device.index]
        with random_lock:
            random_order(self._pool.device).order()
            before = generator.get_offset()
            with drawing(self.generators):
                graph.replay()
            self.draws = self.draws or bool(self.generators) or generator.get_offset() != before
        self._replayed = True

    def native_commit(self, node: int) -> NativeCommit | None:
        """The driver's function that sends a node of that kind."""
        return self._params[node].native(self._executable)

    def native_launch(self) -> tuple[int, int] | LaunchInPython | None:
        """cuGraphLaunch; or torch's replay if random numbers are drawn, whose state it prepares before."""
        if not self._replayed:
            return None
        if self.draws:
            return LaunchInPython(self._may_draw, self._launch_drawing)
        return function_pointer("cuGraphLaunch"), int(self._executable)

    def _may_draw(self) -> bool:
        """Whether a graph that draws can wait now for the last one that did."""
        return not random_order(self._pool.device).is_blocked()

    def _launch_drawing(self) -> bool:
        """Replay as a graph that draws, if that is possible now; whether it was."""
        if self._graph is None or not self._may_draw():
            return False
        self._replay_drawing(self._graph)
        return True

    def release(self, *keep: object) -> None:
        """Destroy the graph, and drop ``keep`` and the memory of our nodes, once the device is done with them."""
        annotations.forget(self._annotated)
        if self._graph is not None:
            graph, self._graph = self._graph, None
            held = [self._params, self._wires, self._kernels, *keep]
            self._params, self._wires, self._kernels = [], [], []
            captures.when_possible(functools.partial(destroy_graph, graph, self._pool, held))


def _ops_by_position(progress: list[tuple[int, int]]) -> list[int]:
    """The operation of each node, given how many nodes there were before each operation.

    cuGraphGetNodes lists nodes in the order in which they were captured; ``tests/gpu`` checks that.
    """
    ops: list[int] = []
    for (op, before), (_, after) in itertools.pairwise(progress):
        ops += [op] * (after - before)
    return ops
