"""The CUDA driver: PyTorch captures and owns memory, cuda-bindings reads and changes nodes."""

# Parts of the allocator are reachable only through torch._C. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch

from pygraph.errors import CaptureError
from pygraph.ir.descriptors import Mechanism
from pygraph.process.collection import no_collection
from pygraph.runtime.cuda import captures as cuda_captures
from pygraph.runtime.cuda.api import check, cu, function_pointer
from pygraph.runtime.cuda.costs import device_time, measured_costs
from pygraph.runtime.cuda.nodes import KernelParams, NodeParams, graph_nodes, node_params
from pygraph.runtime.cuda.rewrite import replace_unpatchable
from pygraph.runtime.cuda.wiring import add_wiring
from pygraph.runtime.driver import (
    Costs,
    Counters,
    Driver,
    InterruptedCaptureError,
    LaunchInPython,
    NativeCommit,
    NodeMechanism,
    Pool,
    RecordedGraph,
    RecordedNode,
    Run,
    Wiring,
    count_native_replays,
    patiently,
)
from pygraph.runtime.trampoline import (
    can_load,
    holder_of,
    kernel_of,
    launched_kernels,
    rebuilt_kernel_of,
    why_not_loaded,
)

T = TypeVar("T")


class _Ordered:
    """What is used on one stream at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: torch.cuda.Stream | None = None
        #: The raw stream of the last replay; native code compares it with the current one.
        self.last_stream = ctypes.c_int64(-1)

    def order(self) -> None:
        """Make the current stream wait for the last use, if that was on another one."""
        current = torch._C._cuda_getCurrentRawStream(self.device.index)  # checked with torch 2.11 and 2.13
        if current == self.last_stream.value:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None:
            if cuda_captures.is_capturing(self._last):
                raise CaptureError("the stream of the last replay is being captured, and cannot be waited for")
            stream.wait_stream(self._last)
        self._last, self.last_stream.value = stream, current

    def is_blocked(self) -> bool:
        """Whether `order` would have to wait for a stream that is being captured."""
        if self._last is None or torch._C._cuda_getCurrentRawStream(self.device.index) == self.last_stream.value:
            return False
        return cuda_captures.is_capturing(self._last)

    def wait(self) -> bool:
        """Wait for the last use; False if its stream captures now, which a wait would end."""
        if self._last is None:
            return True
        if cuda_captures.is_capturing(self._last):
            return False
        # Not for the stream itself, which torch refuses under `torch.cuda.set_sync_debug_mode("error")`.
        self._last.record_event().synchronize()
        return True


class CudaPool(_Ordered, Pool):
    """A private pool of PyTorch's caching allocator; replays on it are ordered across streams."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._keepers: list[tuple[Any, torch.cuda.CUDAGraph]] = []
        self.renew()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Bound above, as at the end of a process a module's names are gone; CUDA may be gone as well then.
        if not is_finalizing():
            for _, keeper in self._keepers:
                cuda_captures.when_possible(functools.partial(_destroy, keeper))

    def renew(self) -> None:
        """Go on in fresh memory, after a capture that failed.

        torch's allocator of pinned host memory counts such a capture as still running in its pool (torch 2.11), and
        refuses another. Graphs in the old memory stay as they are.
        """
        self.handle, keeper = _new_pool(self.device)
        self._keepers.append((self.handle, keeper))

    def is_blocked(self) -> bool:
        """For its own last replay, or for the last one of any function that draws random numbers."""
        return super().is_blocked() or _random_order(self.device).is_blocked()

    def nbytes(self) -> int:
        """Bytes of the segments that the pool holds."""
        # Of everything, and then chosen: with a pool's identifier, torch 2.11 takes references that are not its own.
        segments: list[Any] = torch.cuda.memory_snapshot()  # pyright: ignore
        mine = {tuple(handle) for handle, _ in self._keepers}
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) in mine)


def _new_pool(device: torch.device) -> tuple[Any, torch.cuda.CUDAGraph]:
    """A pool's handle, and a graph of one small kernel in it.

    A pool cannot be used again once its last graph is gone (torch 2.11 and 2.13 assert on it), so every pool keeps
    one; and a capture that succeeds ends the state in which a failed one leaves the random generator.
    """

    def attempt() -> tuple[Any, torch.cuda.CUDAGraph]:
        handle, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        cuda_captures.capture(graph, handle, lambda: torch.zeros(1, device=device))
        return handle, graph

    stream = cuda_captures.capture_stream(device)
    with cuda_captures.exclusive(), no_collection(), torch.cuda.device(device), torch.cuda.stream(stream):
        return patiently(attempt, cuda_captures.PAUSES)


class CudaGraph(RecordedGraph):
    """A captured graph, its executable form, and writable copies of its nodes' parameters."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: CudaPool,
        counters: Counters,
        progress: list[tuple[int, int]],
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self._counters = counters
        self._wires: list[object] = []
        self._replayed = False
        raw = cu.CUgraph(graph.raw_cuda_graph())
        handles = graph_nodes(raw)
        ops = _ops_by_position(progress)
        if len(ops) != len(handles):
            raise CaptureError(f"{len(handles)} nodes were captured where {len(ops)} had been counted")
        handles = replace_unpatchable(raw, handles, pool.device)
        self._instantiate()
        self._params: list[NodeParams] = []
        nodes: list[RecordedNode] = []
        for handle, op in zip(handles, ops, strict=True):
            for params in node_params(handle):
                self._params.append(params)
                nodes.append(RecordedNode(params.kind, params.name, op, params.buffer.raw))
        self.nodes = tuple(nodes)
        # Triton and Inductor unload a kernel when nobody holds it.
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
        places: list[list[tuple[int, int]]] = [[] for _ in range(wiring.values)]
        for params, values in added.nodes:
            for index, value in enumerate(values):
                places[value].append((len(self._params), 8 * index))
            self._params.append(params)
            self.nodes += (RecordedNode(params.kind, params.name, -1, params.buffer.raw),)
        self._instantiate()
        self._pool.order()  # as with a replay, whoever destroys the graph waits for the stream
        stream = torch.cuda.current_stream(self._pool.device)
        # A graph whose nodes are updated by the device must be on the device before its first launch.
        check(cu.cuGraphUpload(self._executable, cu.CUstream(stream.cuda_stream)))
        return places

    def replay(self) -> None:
        """Launch on the current stream."""
        assert self._graph is not None, "the graph has been released"
        if self.draws or not self._replayed:
            self._replay_and_see(self._graph)
        else:
            self._graph.replay()
        self._counters.replays += 1
        self._counters.launches += 1

    def _replay_and_see(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay as a graph that may draw random numbers, and find out whether it does."""
        # Graphs of one generator read its seed from memory that torch 2.11 writes before each replay of any.
        generator = torch.cuda.default_generators[self._pool.device.index]
        with _random_lock:
            _random_order(self._pool.device).order()
            before = generator.get_offset()
            graph.replay()
            self.draws = self.draws or generator.get_offset() != before
        self._replayed = True

    def native_commit(self, node: int) -> NativeCommit | None:
        """As the driver's function that sends a node of that kind."""
        return self._params[node].native(self._executable)

    def native_launch(self) -> tuple[int, int] | LaunchInPython | None:
        """As cuGraphLaunch; or as torch does if random numbers are drawn, whose state it prepares before a replay."""
        if not self._replayed:
            return None
        if self.draws:
            return LaunchInPython(self._may_draw, self._launch_drawing)
        return function_pointer("cuGraphLaunch"), int(self._executable)

    def _may_draw(self) -> bool:
        """Whether what a graph that draws has to wait for can be waited for now."""
        return not _random_order(self._pool.device).is_blocked()

    def _launch_drawing(self) -> bool:
        """Replay as a graph that draws, if that is possible now; whether it was."""
        if self._graph is None or not self._may_draw():
            return False
        self._replay_and_see(self._graph)
        return True

    def release(self, *keep: object) -> None:
        """Destroy the graph once the device is done with it; also what our nodes use, and ``keep``."""
        if self._graph is not None:
            graph, self._graph = self._graph, None
            held = [self._params, self._wires, self._kernels, *keep]
            self._params, self._wires, self._kernels = [], [], []
            cuda_captures.when_possible(functools.partial(_destroy, graph, self._pool, held))


def _destroy(graph: torch.cuda.CUDAGraph, pool: CudaPool | None = None, held: list[object] | None = None) -> bool:
    """Destroy a graph, and then let go of ``held``; False if a replay may still run and cannot be waited for now."""
    with cuda_captures.beside_captures():
        if pool is not None and not pool.wait():
            return False
        graph.reset()
    if held is not None:
        held.clear()
    return True


class CudaDriver(Driver):
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index: Any = device.index  # None for plain "cuda", which torch's stubs leave out
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._counters = Counters()

    @property
    def counters(self) -> Counters:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What has been done, native replays included."""
        count_native_replays()
        return self._counters

    def refusal(self) -> str | None:
        """Only torch's caching allocator keeps the memory of a graph for as long as the graph lives."""
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            return f"memory comes from the allocator {backend}, which does not keep that of graphs for them"
        # Torch 2.11 cannot be asked whether it caches; memory that it does not cache it does not count.
        before = self.allocated_total()
        torch.empty(1, dtype=torch.uint8, device=self.device)
        if self.allocated_total() == before:
            return "torch's caching allocator is off, which keeps the memory of graphs for them"
        return None

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

    @contextlib.contextmanager
    def unwatched(self) -> Generator[None, None, None]:
        """With `torch.cuda.set_sync_debug_mode` off."""
        mode = torch.cuda.get_sync_debug_mode()
        if not mode:
            yield
            return
        torch.cuda.set_sync_debug_mode(0)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run on the stream that captures, so that libraries have loaded and chosen before a capture begins."""
        with cuda_captures.exclusive(), torch.cuda.device(self.device):
            _give_back()
            with self._on(cuda_captures.capture_stream(self.device)):
                result = run()
            torch.cuda.synchronize()
            _give_back()  # recordings and calls, on other streams and in other pools, could not use what is left
        return result

    def record(self, body: Callable[[Callable[[int], None]], T], pool: Pool) -> tuple[RecordedGraph, T]:
        """Capture ``body`` into a graph."""
        assert isinstance(pool, CudaPool)
        # A collection may free tensors, and with them call into CUDA, in the middle of a capture.
        with cuda_captures.exclusive(), no_collection(), torch.cuda.device(self.device), _workspaces_in_pool():
            return self._record(body, pool)

    def _record(self, body: Callable[[Callable[[int], None]], T], pool: CudaPool) -> tuple[RecordedGraph, T]:
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        progress: list[tuple[int, int]] = []

        def launch() -> T:
            stream = torch.cuda.current_stream()
            with launched_kernels():
                result = body(lambda op: progress.append((op, _captured_count(stream))))
            progress.append((-1, _captured_count(stream)))
            return result

        try:
            with self._on(cuda_captures.capture_stream(self.device)):
                result = cuda_captures.capture(graph, pool.handle, launch)
        except BaseException:
            torch.cuda.synchronize(self.device)
            pool.renew()
            raise
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
        return self._allocated_bytes()["allocated"]

    def live_bytes(self) -> int:
        """Bytes that tensors use now."""
        return self._allocated_bytes()["current"]

    def _allocated_bytes(self) -> dict[str, int]:
        torch.cuda.init()  # before that there are no statistics
        # Asked around every operation of a recording; memory_allocated() sorts and flattens all statistics first.
        return torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]

    def costs(self) -> Costs:
        """Measured once per machine and kept on disk."""
        with cuda_captures.exclusive():  # it captures and waits, which must not meet a capture of another thread
            return measured_costs(self.device)

    def replay_time(self, graph: RecordedGraph, restore: Callable[[], object] | None = None) -> float:
        """Median of a few replays, by events."""
        return device_time(graph.replay, self.device, restore)

    def native_stream(self) -> tuple[Callable[[int], int], int]:
        """PyTorch's current stream, and cuStreamIsCapturing."""
        return torch._C._cuda_getCurrentRawStream, function_pointer(
            "cuStreamIsCapturing"
        )  # checked with torch 2.11 and 2.13

    def measure(self, run: Callable[[], object]) -> float:
        """Median microseconds of a call in a row of calls: the larger of what the host and the device need.

        Runs that must be prepared are timed one by one, which comes to the same.
        """
        if isinstance(run, Run) and run.restore is not None:
            with torch.cuda.device(self.device):
                return _time_of_prepared(run, self.device)
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


_SHORTEST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3  # seconds
_CYCLES = 2e9  # that a device counts in a second, at most about
_MOST_RUNS, _FEWEST_RUNS, _BUDGET = 25, 5, 0.05  # the last in seconds


def _time_of_prepared(run: Run, device: torch.device) -> float:
    """The larger of the median times that the host and the device need for a run, in microseconds.

    While the host launches a run the device is still busy with the restoring and then sleeps, so that events on it see
    no gaps in which it waits for the host, as in a row of calls. Longer runs than the longest sleep have gaps, and
    there the host's time is what counts.
    """
    started = time.perf_counter()
    hosts: list[float] = []
    devices: list[float] = []
    host = 0.0
    for index in range(_MOST_RUNS + 1):
        if index > _FEWEST_RUNS and time.perf_counter() - started > _BUDGET:
            break
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run.prepare()
        sleep = min(max(1.5 * host, _SHORTEST_SLEEP), _LONGEST_SLEEP)
        # It has no public name; torch's own tests use it to keep a stream busy. Checked with torch 2.13, not on a GPU.
        torch.cuda._sleep(int(sleep * _CYCLES))  # pyright: ignore
        start.record()
        before = time.perf_counter()
        run.timed()
        host = time.perf_counter() - before
        end.record()
        _synchronize(device)
        if index:  # the first one warms up
            hosts.append(host * 1e6)
            devices.append(start.elapsed_time(end) * 1e3)
    return max(statistics.median(hosts), statistics.median(devices))


_random_orders: dict[int, _Ordered] = {}
_random_lock = threading.RLock()  # from the order of a replay that draws to its launch


def _random_order(device: torch.device) -> _Ordered:
    return _random_orders.setdefault(device.index, _Ordered(device))


def _synchronize(device: torch.device) -> None:
    """Wait for a device; not while another thread captures, which such a wait would break."""
    with cuda_captures.exclusive():
        torch.cuda.synchronize(device)


def _give_back() -> None:
    """Return what torch has cached for streams, cuBLAS workspaces included, as torch.cuda.graph does."""
    torch._C._cuda_clearCublasWorkspaces()  # checked with torch 2.11 and 2.13
    torch.cuda.empty_cache()


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


def _captured_count(stream: torch.cuda.Stream) -> int:
    """How many nodes the stream's capture has so far; -1 if the stream has not joined all of them yet."""
    # cuda-bindings 12 and 13 agree on: status, id, graph, dependencies, …, number of dependencies
    values = check(cu.cuStreamGetCaptureInfo(cu.CUstream(stream.cuda_stream)))
    if values[0] != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise InterruptedCaptureError("the capture was invalidated")
    return check(cu.cuGraphGetNodes(values[2], 0))[1]


def _ops_by_position(progress: list[tuple[int, int]]) -> list[int]:
    """The operation of each node, given how many nodes there were before each operation.

    cuGraphGetNodes lists nodes in the order in which they were captured; ``tests/gpu`` checks that.
    """
    ops: list[int] = []
    for (op, before), (_, after) in itertools.pairwise(progress):
        ops += [op] * (after - before)
    return ops
