"""Conditional nodes of a graph that is being captured: a part is captured into the graph that the node holds.

The parts run on streams of their own, one for each depth. Torch's allocator takes the memory of a capture from its pool
by the stream's capture, which is another one in a part; so, from the first part on, all that the thread allocates comes
from there. See docs/design/0040-conditional-nodes.md.
"""

# The allocator is reachable only through torch._C. Checked with torch 2.11; 2.13 has the same names.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from pygraph.runtime.cuda.api import check, cu
from pygraph.runtime.cuda.kernels import launch_params

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


class ConditionalNodes:
    """Adds conditional nodes to a capture.

    Args:
        device: The device.
        pool: The handle of the memory pool of the capture.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device, self._pool = device, pool
        self._depth = 0
        self._takes_all = False

    def branch(self, predicate: torch.Tensor, parts: Sequence[Callable[[], object]]) -> None:
        """Add a node that does the first part if the predicate is true, and else the second."""
        kind = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        handle, graphs = self._add(predicate, kind, len(parts))
        del handle
        for graph, part in zip(graphs, parts, strict=True):
            with self._captured_into(graph):
                part()

    def loop(self, predicate: torch.Tensor, part: Callable[[], torch.Tensor]) -> None:
        """Add a node that repeats a part, which returns the next predicate, as long as it is true."""
        handle, graphs = self._add(predicate, cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE, 1)
        with self._captured_into(graphs[0]):
            self._set_condition(handle, part())

    def _add(self, predicate: torch.Tensor, kind: Any, count: int) -> tuple[Any, list[Any]]:
        graph, _ = _captured()
        context = check(cu.cuCtxGetCurrent())
        handle = check(cu.cuGraphConditionalHandleCreate(graph, context, 0, 0))
        self._set_condition(handle, predicate)
        params = cu.CUgraphNodeParams()
        params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle, params.conditional.ctx = handle, context
        params.conditional.type, params.conditional.size = kind, count
        graph, before = _captured()
        _go_on_after(check(cu.cuGraphAddNode(graph, before or None, None, len(before), params)))
        return handle, [params.conditional.phGraph_out[number] for number in range(count)]

    def _set_condition(self, handle: Any, predicate: torch.Tensor) -> None:
        """Add a kernel that tells a conditional node its predicate."""
        arguments = [ctypes.c_uint64(int(handle)), ctypes.c_uint64(predicate.data_ptr())]
        params, _keep = launch_params("pygraph_set_condition", 1, arguments, self._device)
        graph, before = _captured()
        _go_on_after(check(cu.cuGraphAddKernelNode(graph, before or None, len(before), params)))

    @contextlib.contextmanager
    def _captured_into(self, graph: Any) -> Generator[None, None, None]:
        """A block whose work is captured into a graph that a conditional node holds."""
        self._take_all()
        stream = _stream(self._device, self._depth)
        raw = cu.CUstream(stream.cuda_stream)
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCaptureToGraph(raw, graph, None, None, 0, mode))
        self._depth += 1
        try:
            with torch.cuda.stream(stream):
                yield
        except BaseException:
            cu.cuStreamEndCapture(raw)  # which may have been invalidated
            raise
        finally:
            self._depth -= 1
        check(cu.cuStreamEndCapture(raw))

    def _take_all(self) -> None:
        """Have the allocator take all that this thread allocates from the pool, until the capture ends."""
        if not self._takes_all:
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            torch._C._cuda_beginAllocateCurrentThreadToPool(self._device.index, self._pool)
            self._takes_all = True


def _captured() -> tuple[Any, list[Any]]:
    """The graph that the current stream is captured into, and the nodes that the next one comes after."""
    stream = cu.CUstream(torch.cuda.current_stream().cuda_stream)
    values = check(cu.cuStreamGetCaptureInfo(stream))
    count = values[-1]
    return values[2], list(values[3])[:count] if count else []


def _go_on_after(node: Any) -> None:
    """Have what the current stream captures next come after a node."""
    stream = cu.CUstream(torch.cuda.current_stream().cuda_stream)
    flag = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    check(cu.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, flag))


def _stream(device: torch.device, depth: int) -> torch.cuda.Stream:
    """The stream on which parts of that depth are captured, and nothing else is done."""
    key = (device.index, depth)
    if key not in _streams:
        raw = check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value))
        _streams[key] = torch.cuda.ExternalStream(int(raw), device)
    return _streams[key]
