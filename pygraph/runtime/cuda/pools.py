"""Private memory pools of captured graphs, and the order of replays on several streams."""

# Parts of the allocator are reachable only through torch._C. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.process.collection import no_collection
from pygraph.runtime.cuda import captures
from pygraph.runtime.driver import Pool, patiently
from pygraph.runtime.recorded_graph import RecordedGraph


class StreamOrder:
    """Uses of one thing on several streams, one after another: each waits for the last one."""

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
            if captures.is_capturing(self._last):
                raise CaptureError("the stream of the last replay is being captured, and cannot be waited for")
            stream.wait_stream(self._last)
        self._last, self.last_stream.value = stream, current

    def is_blocked(self) -> bool:
        """Whether `order` would have to wait for a stream that is being captured."""
        if self._last is None or torch._C._cuda_getCurrentRawStream(self.device.index) == self.last_stream.value:
            return False
        return captures.is_capturing(self._last)

    def wait(self) -> bool:
        """Wait for the last use; False if its stream captures now, which a wait would end."""
        if self._last is None:
            return True
        if captures.is_capturing(self._last):
            return False
        # Not for the stream itself, which torch refuses under `torch.cuda.set_sync_debug_mode("error")`.
        self._last.record_event().synchronize()
        return True


_random_orders: dict[int, StreamOrder] = {}
random_lock = threading.RLock()  # from the order of a replay that draws to its launch


def random_order(device: torch.device) -> StreamOrder:
    """The order of all replays on a device that draw random numbers, of whatever function."""
    return _random_orders.setdefault(device.index, StreamOrder(device))


class CudaPool(StreamOrder, Pool):
    """A private pool of PyTorch's caching allocator; replays on it are ordered across streams.

    Args:
        device: The device.
        lasting: Whether more than one recording uses it. The memory of the other kind goes back with its only graph.
    """

    def __init__(self, device: torch.device, lasting: bool = True) -> None:
        StreamOrder.__init__(self, device)
        Pool.__init__(self)
        self._keepers: list[tuple[Any, torch.cuda.CUDAGraph]] = []
        #: What captures are given; None if the next one has to `renew` it.
        self.handle: Any = None
        if lasting:
            self.renew()
        else:
            self.handle = torch.cuda.graph_pool_handle()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Bound above, as at the end of a process a module's names are gone; CUDA may be gone as well then.
        if not is_finalizing():
            self._destroy_keepers()

    def _destroy_keepers(self) -> None:
        keepers, self._keepers = self._keepers, []
        for _, keeper in keepers:
            captures.when_possible(functools.partial(destroy_graph, keeper))

    def end_use(self, graph: RecordedGraph) -> None:
        """Note that a graph is not replayed any more; after the last one the allocator can give the memory back."""
        super().end_use(graph)
        if not self.graphs:
            self.handle = None
            self._destroy_keepers()

    def renew(self) -> None:
        """Go on in fresh memory, after a capture that failed, or after the last graph is gone.

        torch's allocator of pinned host memory counts such a capture as still running in its pool (torch 2.11), and
        refuses another. Graphs in the old memory stay as they are.
        """
        self.handle, keeper = _new_pool(self.device)
        self._keepers.append((self.handle, keeper))

    def is_blocked(self) -> bool:
        """Whether its own last replay, or the last one that drew random numbers, cannot be waited for now."""
        return super().is_blocked() or random_order(self.device).is_blocked()

    def segments(self) -> list[tuple[int, int]]:
        """Address and size of the segments that the pool holds."""
        # Of everything, and then chosen: with a pool's identifier, torch 2.11 takes references that are not its own.
        segments: list[Any] = torch.cuda.memory_snapshot()  # pyright: ignore
        mine = {tuple(handle) for handle in (self.handle, *(handle for handle, _ in self._keepers)) if handle}
        chosen = [segment for segment in segments if tuple(segment["segment_pool_id"]) in mine]
        return [(segment["address"], segment["total_size"]) for segment in chosen]


def _new_pool(device: torch.device) -> tuple[Any, torch.cuda.CUDAGraph]:
    """A pool's handle, and a graph of one small kernel in it.

    A pool cannot be used again once its last graph is gone (torch 2.11 and 2.13 assert on it), so every pool keeps
    one; and a capture that succeeds ends the state in which a failed one leaves the random generator.
    """

    def attempt() -> tuple[Any, torch.cuda.CUDAGraph]:
        handle, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        captures.capture(graph, handle, lambda: torch.zeros(1, device=device))
        return handle, graph

    stream = captures.capture_stream(device)
    with captures.exclusive(), no_collection(), torch.cuda.device(device), torch.cuda.stream(stream):
        return patiently(attempt, captures.PAUSES)


def destroy_graph(graph: torch.cuda.CUDAGraph, pool: CudaPool | None = None, held: list[object] | None = None) -> bool:
    """Destroy a graph, and then drop ``held``; False if a replay may still run and cannot be waited for now."""
    with captures.allowed_during_captures():
        if pool is not None and not pool.wait():
            return False
        graph.reset()
    if held is not None:
        held.clear()
    return True
