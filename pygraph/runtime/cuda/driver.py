"""The CUDA driver: PyTorch captures and owns memory, cuda-bindings reads and changes nodes."""

# Parts of the allocator are reachable only through torch._C. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from pygraph.ir.dropout_masks import noted
from pygraph.process.cache import installed_version
from pygraph.process.collection import no_collection
from pygraph.runtime.cuda import captures
from pygraph.runtime.cuda.api import check, cu, function_pointer
from pygraph.runtime.cuda.conditional_nodes import ConditionalNodes
from pygraph.runtime.cuda.costs import costs_on
from pygraph.runtime.cuda.graphs import CudaGraph
from pygraph.runtime.cuda.kernel_times import kernel_times
from pygraph.runtime.cuda.pools import CudaPool
from pygraph.runtime.cuda.timing import device_time, sample, synchronize
from pygraph.runtime.cuda.utilization import busy_processes
from pygraph.runtime.driver import (
    Costs,
    Counters,
    Driver,
    InterruptedCaptureError,
    KernelTime,
    Pool,
    Run,
    count_native_replays,
)
from pygraph.runtime.graph_generators import GraphGenerator, put_back
from pygraph.runtime.launched_kernels import launched_kernels
from pygraph.runtime.recorded_graph import RecordedGraph
from pygraph.runtime.samples import Sample

T = TypeVar("T")


class CudaDriver(Driver):
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index: Any = device.index  # None for plain "cuda", which torch's stubs leave out
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._counters = Counters()
        self._conditional: ConditionalNodes | None = None  # of the capture that is in progress

    @property
    def counters(self) -> Counters:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Counters of what was done, native replays included."""
        count_native_replays()
        return self._counters

    def refusal(self) -> str | None:
        """The reason why nothing can be recorded: only torch's caching allocator keeps memory for graphs."""
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            return f"memory comes from the allocator {backend}, which does not keep that of graphs for them"
        # Torch 2.11 cannot be asked whether it caches; memory that it does not cache it does not count.
        before = self.allocated_total()
        torch.empty(1, dtype=torch.uint8, device=self.device)
        if self.allocated_total() == before:
            return "torch's caching allocator is off, which keeps the memory of graphs for them"
        return None

    def new_pool(self, *, lasting: bool = True) -> CudaPool:
        """A fresh private pool."""
        return CudaPool(self.device, lasting)

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
        """A block with `torch.cuda.set_sync_debug_mode` off."""
        mode = torch.cuda.get_sync_debug_mode()
        if not mode:
            yield
            return
        torch.cuda.set_sync_debug_mode(0)
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def give_back(self) -> None:
        """Return what the allocator has cached to the device.

        That is where the segments of a private pool go whose last graph has been destroyed: torch (2.11 and 2.13) keeps
        them cached for the pool, which nothing allocates from any more, until its cache is emptied or an allocation
        finds no memory. A segment in which a tensor is alive waits for that.
        """
        with captures.exclusive():
            captures.give_back()  # graphs first whose destruction has been put off
            torch.cuda.empty_cache()

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run on the stream that captures, so that libraries have loaded and chosen before a capture begins."""
        with captures.exclusive(), torch.cuda.device(self.device):
            _give_back()
            with self._on(captures.capture_stream(self.device)):
                result = run()
            torch.cuda.synchronize()
            _give_back()  # recordings and calls, on other streams and in other pools, could not use what is left
        return result

    def record(
        self, body: Callable[[Callable[[int], None]], T], pool: Pool, generators: Sequence[GraphGenerator] = ()
    ) -> tuple[RecordedGraph, T]:
        """Capture ``body`` into a graph."""
        assert isinstance(pool, CudaPool)
        # A collection may free tensors, and with them call into CUDA, in the middle of a capture.
        with captures.exclusive(), no_collection(), torch.cuda.device(self.device), _workspaces_in_pool():
            return self._record(body, pool, generators)

    def _record(
        self, body: Callable[[Callable[[int], None]], T], pool: CudaPool, generators: Sequence[GraphGenerator]
    ) -> tuple[RecordedGraph, T]:
        if pool.handle is None:
            pool.renew()
        handle = pool.handle
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        _register(graph, generators)
        progress: list[tuple[int, int]] = []
        masks: list[tuple[int, int]] = []

        def launch() -> T:
            stream = torch.cuda.current_stream()
            with launched_kernels(), noted(lambda: _captured_count(stream)) as drawn:
                result = body(lambda op: progress.append((op, _captured_count(stream))))
            progress.append((-1, _captured_count(stream)))
            masks.extend(drawn)
            return result

        self._conditional = ConditionalNodes(self.device, handle)
        try:
            with self._on(captures.capture_stream(self.device)):
                result = captures.capture(graph, handle, launch)
        except BaseException:
            torch.cuda.synchronize(self.device)
            pool.renew()
            raise
        finally:
            self._conditional = None
        self.counters.captures += 1
        recorded = CudaGraph(graph, pool, self.counters, progress, masks)
        recorded.generators = tuple(generators)
        return recorded, result

    def branch(self, predicate: torch.Tensor, parts: Sequence[Callable[[], object]]) -> None:
        """Add a conditional node to the capture in progress."""
        assert self._conditional is not None, "nothing is recorded"
        self._conditional.branch(predicate, parts)

    def loop(self, predicate: torch.Tensor, part: Callable[[], torch.Tensor]) -> None:
        """Add a node that repeats a part to the capture in progress."""
        assert self._conditional is not None, "nothing is recorded"
        self._conditional.loop(predicate, part)

    def tensor_at(
        self, address: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor over foreign memory."""
        return torch.ops.pygraph.load(
            torch.tensor([address], dtype=torch.int64, device="cpu"), 0, list(shape), list(stride), dtype, self.device
        )

    def synchronize(self) -> None:
        """Wait for the device."""
        self.counters.synchronizations += 1
        synchronize(self.device)

    def random_state(self) -> Any:
        """The default generator's state."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Any) -> None:
        """Put the default generator back."""
        put_back(torch.cuda.default_generators[self.device.index], state)

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
        """The mechanisms' times on this device, measured once per machine and stored on disk."""
        with captures.exclusive():  # it captures and waits, which must not meet a capture of another thread
            return costs_on(self.device)

    def replay_time(self, graph: RecordedGraph, restore: Callable[[], object] | None = None) -> float:
        """Median of a few replays, by events."""
        return device_time(graph.replay, self.device, restore)

    def native_stream(self) -> tuple[Callable[[int], int], int]:
        """PyTorch's current stream, and cuStreamIsCapturing."""
        return torch._C._cuda_getCurrentRawStream, function_pointer(
            "cuStreamIsCapturing"
        )  # checked with torch 2.11 and 2.13

    def sample(self, run: Run, *, latency: bool = False) -> Sample:
        """The times of one run, of the host and of the device apart."""
        return sample(run, self.device, latency=latency)

    def kernel_times(
        self, run: Callable[[Callable[[int], None]], object], restore: Callable[[], object], count: int
    ) -> list[list[KernelTime]]:
        """The kernels of runs, by torch's profiler."""
        with torch.cuda.device(self.device):
            return kernel_times(run, restore, count, self.device)

    @property
    def kernel_clock(self) -> str:
        """The clock of `kernel_times`."""
        return "times of the device, by torch.profiler"

    def others(self) -> str | None:
        """Other processes that have kept the device busy in the last second."""
        return busy_processes(self.device)

    def identity(self) -> tuple[str, ...]:
        """The GPU, and the versions of its driver, of torch and of Triton."""
        name, driver = torch.cuda.get_device_name(self.device), check(cu.cuDriverGetVersion())
        return name, f"driver {driver}", f"torch {torch.__version__}", f"triton {installed_version('triton')}"


def _register(graph: torch.cuda.CUDAGraph, generators: Sequence[GraphGenerator]) -> None:
    """Have a graph draw from generators besides the default one."""
    with warnings.catch_warnings():
        # Later torch does it when they are first drawn from, and warns that it need not be done.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        for generator in generators:
            graph.register_generator_state(generator.own)  # pyright: ignore[reportUnknownMemberType]


def _give_back() -> None:
    """Return what torch has cached for streams, cuBLAS workspaces included, as torch.cuda.graph does."""
    torch._C._cuda_clearCublasWorkspaces()  # checked with torch 2.11 and 2.13
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _workspaces_in_pool() -> Generator[None, None, None]:
    """Have a capture use cuBLAS workspaces of its own, which live in its pool.

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
    """The number of nodes that the stream's capture has so far; -1 if the stream has not joined all of them yet."""
    # cuda-bindings 12 and 13 agree on: status, id, graph, dependencies, …, number of dependencies
    values = check(cu.cuStreamGetCaptureInfo(cu.CUstream(stream.cuda_stream)))
    if values[0] != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise InterruptedCaptureError("the capture was invalidated")
    return check(cu.cuGraphGetNodes(values[2], 0))[1]
