"""The Driver of the emulated device: recording, patching and replaying graphs without a GPU."""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import dataclasses
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch
from typing_extensions import override  # torch depends on it

from pygraph.errors import ArgumentError, CaptureError, describe
from pygraph.ir import ops
from pygraph.process import reentrancy
from pygraph.process.collection import no_collection
from pygraph.runtime.driver import Costs, Counters, Driver, KernelTime, Pool, Run
from pygraph.runtime.emulated import device, device_lock, launches
from pygraph.runtime.emulated import tensors as memory
from pygraph.runtime.emulated.conditional_nodes import branch_node, every_function, loop_node
from pygraph.runtime.emulated.graphs import EmulatedGraph, Recorder
from pygraph.runtime.emulated.kernel_times import kernel_times
from pygraph.runtime.emulated.memory import EmulatedPool
from pygraph.runtime.emulated.nodes import KernelNode
from pygraph.runtime.graph_generators import GraphGenerator
from pygraph.runtime.recorded_graph import RecordedGraph
from pygraph.runtime.samples import Sample

T = TypeVar("T")

_LAUNCH_US: Final = 5.0
_REPLAY_US: Final = 3.0
_NODE_US: Final = 0.5
_PATCH_US: Final = 0.3
_COPY_US: Final = 4.0
_COPY_BYTES_PER_US: Final = 1e5

_MEASURED_RUNS: Final = 3
"""How often what is measured is run: on CUDA samples are many, a third run already meets what a first one and a second
one have left behind, and the model needs no more."""


class EmulatedDriver(Driver):
    """The emulated device; `driver` makes the one there is."""

    def __init__(self) -> None:
        device.register()
        ops.register_memory_view(memory.NAME, self.tensor_at)
        self.device = torch.device(memory.NAME, 0)
        self.counters: Counters = launches.counters
        self._replayed = [0]  # nodes that replays have run
        reentrancy.register(self)

    def after_fork(self) -> None:
        """Free the device in a child process: what another thread was recording is not recorded there."""
        for lock in (device_lock.lock, memory.allocator.lock):
            lock._at_fork_reinit()  # pyright: ignore  # as CPython does for its own locks, 3.11 to 3.14
        if launches.recorder is not None:
            launches.set_recorder(None)
            memory.allocator.current, memory.allocator.freed = memory.allocator.default, None

    @override
    def new_pool(self, *, lasting: bool = True) -> Pool:
        return EmulatedPool(memory.allocator)

    @override
    def give_back(self) -> None:
        """Settle what has been freed; nothing is ever given back."""
        memory.allocator.settle()

    @override
    def record(
        self, body: Callable[[Callable[[int], None]], T], pool: Pool, generators: Sequence[GraphGenerator] = ()
    ) -> tuple[RecordedGraph, T]:
        """Run ``body(mark)`` with its device work recorded; see `Driver.record`.

        Everything is executed, to know the shapes, and then undone: memory from the pool is poisoned, other memory
        and the random state are as before. Work of other threads on the device waits until the recording is over.
        """
        call = "driver.record(body, pool)"
        if not isinstance(pool, EmulatedPool):
            raise ArgumentError(
                describe(call, f"pool is a {type(pool).__name__}", expected="a pool of driver.new_pool()")
            )
        with device_lock.lock, no_collection():
            return self._record(call, body, pool, generators)

    def _record(
        self,
        call: str,
        body: Callable[[Callable[[int], None]], T],
        pool: EmulatedPool,
        generators: Sequence[GraphGenerator],
    ) -> tuple[RecordedGraph, T]:
        if launches.recorder is not None:
            raise CaptureError(describe(call, "the device is recording already", remedy="End that recording first."))
        recorder = Recorder(generators)
        random_state = self.random_state()
        self._begin(recorder, pool)
        try:
            result = body(recorder.mark)
        except BaseException as error:
            self._end(recorder, pool, random_state)
            memory.allocator.release(pool)
            if not isinstance(error, RuntimeError) or isinstance(error, CaptureError):
                raise
            traceback.clear_frames(error.__traceback__)  # their tensors would live as long as the exception
            raise self._refusal(call, recorder.refused or error) from error
        self._end(recorder, pool, random_state)
        if recorder.refused is not None:  # the body has swallowed it; a CUDA capture would be invalid as well
            memory.allocator.release(pool)
            raise self._refusal(call, recorder.refused) from recorder.refused
        self.counters.captures += 1
        graph = EmulatedGraph(recorder.nodes, recorder.functions, pool, self._replayed)
        graph.generators = tuple(generators)
        return graph, result

    def _begin(self, recorder: Recorder, pool: EmulatedPool) -> None:
        allocator = memory.allocator
        allocator.settle()
        pool.holds += 1
        allocator.current = pool
        allocator.freed = []
        launches.set_recorder(recorder)

    def _end(self, recorder: Recorder, pool: EmulatedPool, random_state: torch.Tensor) -> None:
        allocator = memory.allocator
        launches.set_recorder(None)
        allocator.current = allocator.default
        recorder.undo()
        allocator.poison_owned(pool)
        freed, allocator.freed = allocator.freed or [], None
        for address, nbytes in freed:  # what was saved before it died has just been put back there
            ctypes.memset(address, 0xFF, nbytes)
        for function in every_function(recorder.functions):
            if isinstance(function, KernelNode) and function.table is not None:
                ctypes.memmove(function.table.data_ptr(), function.table_bytes, len(function.table_bytes))
        self.set_random_state(random_state)

    @override
    def branch(self, predicate: torch.Tensor, parts: Sequence[Callable[[], object]]) -> None:
        outer = self._recorder()
        recorders = [self._recorded(outer, part)[0] for part in parts]
        outer.add(branch_node(predicate, recorders, outer.op))

    @override
    def loop(self, predicate: torch.Tensor, part: Callable[[], torch.Tensor]) -> None:
        outer = self._recorder()
        recorder, following = self._recorded(outer, part)
        outer.add(loop_node(predicate, recorder, following, outer.op))

    def _recorder(self) -> Recorder:
        recorder = launches.recorder
        assert isinstance(recorder, Recorder), "nothing is recorded"
        return recorder

    def _recorded(self, outer: Recorder, part: Callable[[], T]) -> tuple[Recorder, T]:
        """The nodes of a part, which is run for that, and its result."""
        inner = outer.inner()
        launches.set_recorder(inner)
        try:
            return inner, part()
        finally:
            launches.set_recorder(outer)

    def _refusal(self, call: str, refused: RuntimeError) -> CaptureError:
        remedy = "Keep operations that need data of the device on the host out of recordings."
        return CaptureError(describe(call, str(refused), remedy=remedy))

    @override
    def tensor_at(
        self, address: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return memory.tensor_at(address, shape, stride, dtype)

    @override
    def synchronize(self) -> None:
        launches.synchronize("synchronize")

    @override
    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    @override
    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    @override
    def allocated_total(self) -> int:
        return memory.allocator.total_bytes()

    @override
    def live_bytes(self) -> int:
        return memory.allocator.live_bytes()

    @override
    def costs(self) -> Costs:
        return Costs(_REPLAY_US, _PATCH_US, 12.0, 0.02, 4.0, 0.1, _COPY_US, _COPY_BYTES_PER_US)

    @override
    def replay_time(self, graph: RecordedGraph, restore: Callable[[], object] | None = None) -> float:
        replay = Run(graph.replay, restore)
        for _ in range(_MEASURED_RUNS - 1):  # after the one of the proof
            replay()
        return _NODE_US * len(graph.nodes)

    @override
    def kernel_times(
        self, run: Callable[[Callable[[int], None]], object], restore: Callable[[], object], count: int
    ) -> list[list[KernelTime]]:
        return kernel_times(run, restore, count)

    @property
    @override
    def kernel_clock(self) -> str:
        return "times of the host, on which the emulated device runs its kernels"

    @property
    @override
    def is_exact(self) -> bool:
        return True

    @override
    def sample(self, run: Run, *, latency: bool = False) -> Sample:
        for _ in range(_MEASURED_RUNS - 1):
            run()
        run.prepare()
        before, nodes = dataclasses.replace(self.counters), self._replayed[0]
        run.timed()
        now = self.counters
        replays = now.replays - before.replays
        launches, copies = now.launches - before.launches - replays, now.copies - before.copies
        host = _LAUNCH_US * launches + _REPLAY_US * replays + _PATCH_US * (now.patches - before.patches)
        host += _COPY_US * copies
        device = _NODE_US * (self._replayed[0] - nodes + launches)
        device += (now.copied_bytes - before.copied_bytes) / _COPY_BYTES_PER_US
        return Sample(host, device)


@functools.cache
def driver() -> EmulatedDriver:
    """The driver of the emulated device; the first call makes the device known to torch."""
    return EmulatedDriver()


def register() -> None:
    """Make the device known to torch; calling it again does nothing."""
    device.register()
