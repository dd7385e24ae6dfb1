"""The CUDA driver: PyTorch captures and owns memory, cuda-bindings reads and changes nodes.

The only module that imports cuda-bindings.
"""

# Parts of the allocator are reachable only through torch._C. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import ctypes
import itertools
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch

from pygraph.errors import CaptureError, DeviceError, describe
from pygraph.runtime.collection import no_collection
from pygraph.runtime.driver import Counters, Driver, Pool, RecordedGraph, RecordedNode

cu: Any  # the driver, whose bindings have no type stubs
try:
    from cuda.bindings import driver as cu  # pyright: ignore
except ImportError as error:  # the extra `cuda` is not installed
    raise DeviceError(
        describe("import cuda.bindings", "cuda-bindings is not installed", remedy="pip install 'pygraph[cuda]'.")
    ) from error

T = TypeVar("T")


def _check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call; CaptureError if it failed."""
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise CaptureError(f"CUDA driver call failed: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


class _Ordered:
    """What is used on one stream at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: torch.cuda.Stream | None = None
        self._last_id = -1

    def order(self) -> None:
        """Make the current stream wait for the last use, if that was on another one."""
        current = torch._C._cuda_getCurrentRawStream(self.device.index)  # checked with torch 2.11 and 2.13
        if current == self._last_id:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None:
            stream.wait_stream(self._last)
        self._last, self._last_id = stream, current


class CudaPool(_Ordered, Pool):
    """A private pool of PyTorch's caching allocator; replays on it are ordered across streams."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._keepers: list[tuple[Any, torch.cuda.CUDAGraph]] = []
        self.renew()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():
            for _, keeper in self._keepers:
                keeper.reset()

    def renew(self) -> None:
        """Go on in fresh memory, after a capture that failed.

        torch's allocator of pinned host memory counts such a capture as still running in its pool (torch 2.11), and
        refuses another. Graphs in the old memory stay as they are.
        """
        self.handle = torch.cuda.graph_pool_handle()
        self._keepers.append((self.handle, _tiny_graph(self.device, self.handle)))

    def nbytes(self) -> int:
        """Bytes of the segments that the pool holds."""
        snapshots: list[Any] = [torch.cuda.memory_snapshot(handle) for handle, _ in self._keepers]  # pyright: ignore
        return sum(segment["total_size"] for snapshot in snapshots for segment in snapshot)


def _tiny_graph(device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of one small kernel.

    A pool cannot be used again once its last graph is gone (torch 2.11 and 2.13 assert on it), so every pool keeps
    one; and a capture that succeeds ends the state in which a failed one leaves the random generator.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(device)
    with _capture_lock, no_collection(), torch.cuda.device(device), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()
    return graph


class _Kernel:
    """A kernel node with a writable copy of its arguments."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.params = _check(cu.cuGraphKernelNodeGetParams(node))
        self.name = _kernel_name(self.params)
        if int(self.params.kernelParams):
            self._copy_arguments()
        else:
            self._copy_extra()

    def _copy_arguments(self) -> None:
        sizes = _argument_sizes(self.params)
        total = sum(-(-size // 8) * 8 for size in sizes)
        # TMA descriptors are aligned to 64 bytes inside an argument; so are copies of arguments here.
        self.buffer = ctypes.create_string_buffer(max(total, 8))
        source = ctypes.cast(int(self.params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
        pointers = (ctypes.c_void_p * max(len(sizes), 1))()
        offset = 0
        for index, size in enumerate(sizes):
            address = ctypes.addressof(self.buffer) + offset
            ctypes.memmove(address, source[index] or 0, size)
            pointers[index] = address
            offset += -(-size // 8) * 8
        self._keep = pointers
        self.params.kernelParams = ctypes.addressof(pointers)

    def _copy_extra(self) -> None:
        """Arguments in one packed buffer (CU_LAUNCH_PARAM_BUFFER_POINTER 1, _SIZE 2, _END 0): cuBLAS's way."""
        if not int(self.params.extra):
            self.buffer = ctypes.create_string_buffer(8)
            return
        extra = ctypes.cast(int(self.params.extra), ctypes.POINTER(ctypes.c_void_p))
        entries: dict[int, int] = {}
        index = 0
        while extra[index]:
            entries[extra[index] or 0] = extra[index + 1] or 0
            index += 2
        size = ctypes.cast(entries[2], ctypes.POINTER(ctypes.c_size_t))[0]
        self.buffer = ctypes.create_string_buffer(ctypes.string_at(entries[1], size), -(-size // 8) * 8)
        length = ctypes.c_size_t(size)
        array = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.buffer), 2, ctypes.addressof(length), 0)
        self._keep = (length, array)
        self.params.extra = ctypes.addressof(array)

    def commit(self, executable: Any) -> None:
        _check(cu.cuGraphExecKernelNodeSetParams(executable, self.node, self.params))


class _Memcpy:
    """A copy node: source and destination addresses, eight bytes each."""

    name = "memcpy"

    def __init__(self, node: Any) -> None:
        self.node = node
        self.params = _check(cu.cuGraphMemcpyNodeGetParams(node))
        self._context = _check(cu.cuCtxGetCurrent())  # a later commit may be on another thread or current device
        words = (int(self.params.srcDevice), int(self.params.dstDevice))
        self.buffer = ctypes.create_string_buffer(b"".join(word.to_bytes(8, "little") for word in words), 16)

    def commit(self, executable: Any) -> None:
        source, target = (int.from_bytes(self.buffer.raw[i : i + 8], "little") for i in (0, 8))
        self.params.srcDevice = cu.CUdeviceptr(source)
        self.params.dstDevice = cu.CUdeviceptr(target)
        _check(cu.cuGraphExecMemcpyNodeSetParams(executable, self.node, self.params, self._context))


class _Memset:
    """A fill node: its destination address, then its value."""

    name = "memset"

    def __init__(self, node: Any) -> None:
        self.node = node
        self.params = _check(cu.cuGraphMemsetNodeGetParams(node))
        self._context = _check(cu.cuCtxGetCurrent())
        words = (int(self.params.dst), int(self.params.value))
        self.buffer = ctypes.create_string_buffer(b"".join(word.to_bytes(8, "little") for word in words), 16)

    def commit(self, executable: Any) -> None:
        self.params.dst = cu.CUdeviceptr(int.from_bytes(self.buffer.raw[0:8], "little"))
        self.params.value = int.from_bytes(self.buffer.raw[8:12], "little")
        _check(cu.cuGraphExecMemsetNodeSetParams(executable, self.node, self.params, self._context))


class _Opaque:
    """A node of another kind, without parameters that could be patched."""

    def __init__(self, node: Any, kind: str) -> None:
        self.node = node
        self.name = kind
        self.buffer = ctypes.create_string_buffer(8)

    def commit(self, executable: Any) -> None:
        raise CaptureError(f"a {self.name} node cannot be patched")


def _argument_sizes(params: Any) -> list[int]:
    sizes: list[int] = []
    while True:
        if int(params.func):
            result = cu.cuFuncGetParamInfo(params.func, len(sizes))
        else:
            result = cu.cuKernelGetParamInfo(params.kern, len(sizes))
        if result[0] != cu.CUresult.CUDA_SUCCESS:  # one past the last argument
            return sizes
        sizes.append(result[2])


def _kernel_name(params: Any) -> str:
    result = cu.cuFuncGetName(params.func) if int(params.func) else cu.cuKernelGetName(params.kern)
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        return "kernel"
    return result[1].decode() if isinstance(result[1], bytes) else str(result[1])


_KINDS = {"KERNEL": "kernel", "MEMCPY": "memcpy", "MEMSET": "memset"}


class CudaGraph(RecordedGraph):
    """A captured graph, its executable form, and writable copies of its nodes' parameters."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: CudaPool, counters: Counters, progress: list[tuple[int, int]]
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self._counters = counters
        raw = cu.CUgraph(graph.raw_cuda_graph())
        handles = _graph_nodes(raw)
        ops = _ops_by_position(progress)
        if len(ops) != len(handles):
            raise CaptureError(f"{len(handles)} nodes were captured where {len(ops)} had been counted")
        graph.instantiate()
        self._executable = cu.CUgraphExec(graph.raw_cuda_graph_exec())
        self._holders = [_holder(handle) for handle in handles]
        self.nodes = tuple(
            RecordedNode(
                kind=_node_kind(handle),
                name=holder.name,
                op=op,
                params=holder.buffer.raw,
            )
            for handle, holder, op in zip(handles, self._holders, ops, strict=True)
        )

    def params_address(self, node: int) -> int:
        """Address of the writable copy."""
        return ctypes.addressof(self._holders[node].buffer)

    def commit(self, node: int) -> None:
        """Send the writable copy to the executable graph."""
        self._holders[node].commit(self._executable)
        self._counters.patches += 1

    def replay(self) -> None:
        """Launch on the current stream."""
        assert self._graph is not None, "the graph has been released"
        if self.draws:
            # Graphs of one generator read its seed from memory that torch 2.11 writes before each replay of any.
            with _random_lock:
                _random_order(self._pool.device).order()
                self._graph.replay()
        else:
            self._graph.replay()
        self._counters.replays += 1
        self._counters.launches += 1

    def release(self) -> None:
        """Destroy the graph once the device is done with it."""
        if self._graph is not None:
            # The executable must not go while a replay may still run.
            _synchronize(self._pool.device)
            self._graph.reset()
            self._graph = None
            self._holders = []


def _graph_nodes(graph: Any) -> list[Any]:
    number = _check(cu.cuGraphGetNodes(graph, 0))[1]
    return list(_check(cu.cuGraphGetNodes(graph, number))[0])[:number] if number else []


def _node_kind(handle: Any) -> str:
    name = str(_check(cu.cuGraphNodeGetType(handle)).name).removeprefix("CU_GRAPH_NODE_TYPE_")
    return _KINDS.get(name, name.lower())


def _holder(handle: Any) -> Any:
    kind = _node_kind(handle)
    match kind:
        case "kernel":
            return _Kernel(handle)
        case "memcpy":
            return _Memcpy(handle)
        case "memset":
            return _Memset(handle)
        case _:
            return _Opaque(handle, kind)


class CudaDriver(Driver):
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index: Any = device.index  # None for plain "cuda", which torch's stubs leave out
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.counters = Counters()

    def new_pool(self) -> CudaPool:
        """A fresh private pool."""
        return CudaPool(self.device)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Generator[None, None, None]:
        """Run on a stream of our own, ordered after and before the current one."""
        with torch.cuda.device(self.device):
            outer = torch.cuda.current_stream()
            stream.wait_stream(outer)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                outer.wait_stream(stream)

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run on the stream that captures, so that cuBLAS has its workspace there before a capture begins."""
        with _capture_lock:
            with self._on(_capture_stream(self.device)):
                run()
            torch.cuda.synchronize(self.device)

    def record(self, body: Callable[[Callable[[int], None]], T], pool: Pool) -> tuple[RecordedGraph, T]:
        """Capture ``body`` into a graph."""
        assert isinstance(pool, CudaPool)
        # A collection may free tensors, and with them call into CUDA, in the middle of a capture.
        with _capture_lock, no_collection(), torch.cuda.device(self.device), _workspaces_in_pool():
            return self._record(body, pool)

    def _record(self, body: Callable[[Callable[[int], None]], T], pool: CudaPool) -> tuple[RecordedGraph, T]:
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        progress: list[tuple[int, int]] = []
        with self._on(_capture_stream(self.device)):
            stream = torch.cuda.current_stream()
            failure: BaseException | None = None
            result: Any = None
            try:
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                result = body(lambda op: progress.append((op, _captured_count(stream))))
                progress.append((-1, _captured_count(stream)))
            except BaseException as error:
                failure = error
            try:
                with warnings.catch_warnings():
                    # Operations on tensors without elements launch nothing; torch takes that for a mistake.
                    warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                    graph.capture_end()
            except RuntimeError as error:
                failure = failure or error
                # capture_end left the allocator in the pool; checked with torch 2.11 and 2.13.
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(self.device.index, pool.handle)
        if failure is not None:
            del result
            with contextlib.suppress(RuntimeError):  # a capture that was refused has no graph to reset
                graph.reset()
            torch.cuda.synchronize(self.device)
            pool.renew()
            if isinstance(failure, RuntimeError) and not isinstance(failure, CaptureError):
                raise CaptureError(str(failure).splitlines()[0]) from failure
            raise failure
        self.counters.captures += 1
        return CudaGraph(graph, pool, self.counters, progress), result

    def tensor_at(
        self, address: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor over foreign memory."""
        return torch.ops.pygraph.load(
            torch.tensor([address], dtype=torch.int64), 0, list(shape), list(stride), dtype, self.device
        )

    def synchronize(self) -> None:
        """Wait for the device."""
        self.counters.synchronizations += 1
        _synchronize(self.device)

    def random_state(self) -> Any:
        """The default generator's state."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Any) -> None:
        """Put the default generator back."""
        torch.cuda.set_rng_state(state, self.device)

    def allocated_total(self) -> int:
        """Bytes handed out since the start."""
        return torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]["allocated"]

    def live_bytes(self) -> int:
        """Bytes that tensors use now."""
        return torch.cuda.memory_allocated(self.device)

    def measure(self, run: Callable[[], object]) -> float:
        """Median microseconds of a call in a row of calls: the larger of what the host and the device need."""
        for _ in range(3):
            run()
        _synchronize(self.device)
        start = time.perf_counter()
        run()
        _synchronize(self.device)
        once = time.perf_counter() - start
        count = max(1, min(20, int(0.01 / max(once, 1e-6))))
        times: list[float] = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(count):
                run()
            _synchronize(self.device)
            times.append((time.perf_counter() - start) / count * 1e6)
        return statistics.median(times)


_streams: dict[int, torch.cuda.Stream] = {}
_capture_lock = threading.RLock()  # one capture at a time, and no warm-up on its stream meanwhile


_random_orders: dict[int, _Ordered] = {}
_random_lock = threading.RLock()  # from the order of a replay that draws to its launch


def _random_order(device: torch.device) -> _Ordered:
    return _random_orders.setdefault(device.index, _Ordered(device))


def _synchronize(device: torch.device) -> None:
    """Wait for a device; not while another thread captures, which such a wait would break."""
    with _capture_lock:
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _workspaces_in_pool() -> Generator[None, None, None]:
    """Have what is captured use cuBLAS workspaces of its own, which live in its pool.

    Torch keeps one workspace per cuBLAS handle and stream (2.11 to 2.13). Recorded graphs would share that of the
    capture stream, also when they are replayed on several streams at once, and would go on writing to it after
    somebody (the cudagraph trees of torch.compile do) has cleared the workspaces and others have got the memory.
    Where there is none, torch allocates it during the capture.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream per device on which everything is warmed up and captured."""
    index = device.index
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(device)
    return _streams[index]


def _captured_count(stream: torch.cuda.Stream) -> int:
    """How many nodes the stream's capture has so far; -1 if the stream has not joined all of them yet."""
    # cuda-bindings 12 and 13 agree on: status, id, graph, dependencies, …, number of dependencies
    values = _check(cu.cuStreamGetCaptureInfo(cu.CUstream(stream.cuda_stream)))
    if values[0] != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise CaptureError("the capture was invalidated")
    return _check(cu.cuGraphGetNodes(values[2], 0))[1]


def _ops_by_position(progress: list[tuple[int, int]]) -> list[int]:
    """The operation of each node, given how many nodes there were before each operation.

    cuGraphGetNodes lists nodes in the order in which they were captured; ``tests/gpu`` checks that.
    """
    ops: list[int] = []
    for (op, before), (_, after) in itertools.pairwise(progress):
        ops += [op] * (after - before)
    return ops
