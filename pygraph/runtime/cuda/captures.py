"""Captures, and the destruction of graphs, which is put off until none is in progress.

While a stream captures, a wait for it, or for the whole device, ends the capture with an error: ours, or one that the
user makes. Functions are dropped at any time (by the garbage collector, in the middle of the user's capture, in another
thread), and their graphs can only be destroyed when the device is done with them. So nothing is destroyed while we
capture, and what ran last on a stream that captures now waits in a list.
"""

# The allocator is reachable only through torch._C. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import collections
import contextlib
import threading
import warnings
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.api import check, cu
from pygraph.runtime.driver import InterruptedCaptureError

T = TypeVar("T")

PAUSES = (*[0.001] * 8, 0.01, 0.1, 1.0)
"""Seconds between attempts at a capture of our own making, which only others can interrupt."""

_lock = threading.RLock()
_captures = 0  # of ours, in the thread that has the lock
_put_off: collections.deque[Callable[[], bool]] = collections.deque()
_streams: dict[int, torch.cuda.Stream] = {}


@contextlib.contextmanager
def exclusive() -> Generator[None, None, None]:
    """A block for one thread at a time that warms up, captures, or waits for a device; nests."""
    try:
        with _lock:
            yield
    finally:
        give_back()


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which everything is warmed up and captured, and nothing else is done.

    Torch hands out the streams of a small pool again and again: other code may have the stream that it gave us, and its
    launches there while we capture would be recorded instead of done.
    """
    index = device.index
    if index not in _streams:
        with torch.cuda.device(device):
            raw = check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value))
        _streams[index] = torch.cuda.ExternalStream(int(raw), device)
    return _streams[index]


def capture(graph: torch.cuda.CUDAGraph, pool: Any, launch: Callable[[], T]) -> T:
    """Capture what ``launch`` does on the current stream, within `exclusive`; afterwards nothing is captured.

    Raises:
        CaptureError: An operation was refused. An `InterruptedCaptureError` if the capture ended for another reason.
    """
    global _captures
    # If another thread empties the cache while we capture, torch waits, with expandable segments, for the stream on
    # which a free segment was used, and a wait for the stream that captures ends the capture.
    torch.cuda.empty_cache()
    _captures += 1
    try:
        return _capture(graph, pool, launch)
    finally:
        _captures -= 1


def _capture(graph: torch.cuda.CUDAGraph, pool: Any, launch: Callable[[], T]) -> T:
    stream = torch.cuda.current_stream()
    failure: BaseException | None = None
    result: Any = None
    interrupted = False
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        result = launch()
    except BaseException as error:
        failure = error
        # Libraries tell that the capture has ended in words of their own; an operation that ended it says the opposite.
        interrupted = _is_invalidated(stream) and "operation not permitted when stream is capturing" not in str(error)
    try:
        with warnings.catch_warnings(), torch.cuda.stream(stream):  # an operation may have left another one
            # Operations on tensors without elements launch nothing; torch takes that for a mistake.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
    except RuntimeError as error:
        if failure is None:
            failure = error
            interrupted = "operation failed due to a previous error during capture" in str(error)
        # capture_end left the allocator in the pool; checked with torch 2.11 and 2.13.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    if failure is None:
        return result
    del result
    with contextlib.suppress(RuntimeError):  # a capture that was refused has no graph to reset
        graph.reset()
    if not isinstance(failure, RuntimeError) or isinstance(failure, CaptureError):
        raise failure
    raise (InterruptedCaptureError if interrupted else CaptureError)(str(failure).splitlines()[0]) from failure


def _is_invalidated(stream: torch.cuda.Stream) -> bool:
    status = check(cu.cuStreamIsCapturing(cu.CUstream(stream.cuda_stream)))
    return status == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED


def when_possible(destroy: Callable[[], bool]) -> None:
    """Call ``destroy`` now, or after the captures that forbid it; again later if it returns False."""
    _put_off.append(destroy)
    give_back()


def give_back() -> None:
    """Destroy what has been put off, if nothing forbids it now.

    A thread that finds another one here, or capturing, leaves it to that thread, which comes here once it has released
    the lock.
    """
    not_yet: list[Callable[[], bool]] = []
    while _put_off and _lock.acquire(blocking=False):
        try:
            if _captures or torch.cuda.is_current_stream_capturing():
                break
            with contextlib.suppress(IndexError):  # a finalizer in this thread may have been faster
                destroy = _put_off.popleft()
                if not destroy():
                    not_yet.append(destroy)
        finally:
            _lock.release()
    _put_off.extend(not_yet)


def put_off() -> int:
    """The number of things that wait to be destroyed."""
    return len(_put_off)


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether a stream is being captured now, by us or by other code."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def allowed_during_captures() -> Generator[None, None, None]:
    """A block in which calls of this thread do not end the captures of other threads, whatever those forbid."""
    before = check(cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(before))
