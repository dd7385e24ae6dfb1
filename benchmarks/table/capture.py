"""A capture of one iteration by torch itself, which replays without copying inputs: the limit of what graphs can do."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from benchmarks.table.setting import Iteration, Setting
from benchmarks.table.workload import Batch


class CaptureError(RuntimeError):
    """An iteration that torch cannot capture.

    Example: it copies a tensor of the host to the device.
    """


def captured(run: Iteration, setting: Setting) -> Iteration:
    """Replays of the launches that an iteration makes for the first batch, on that batch whatever is given.

    An iteration that waits for the device is not captured at all: an attempt would leave the allocator in a capture.

    Raises:
        CaptureError: The iteration cannot be captured, and why.
    """
    if setting.device.type != "cuda":
        raise CaptureError("a capture by torch needs a CUDA device")
    batch = setting.batches[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):  # compiles, and makes the state of the optimizer
            run(batch)
        _check_no_waiting(run, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # So that the graph has a workspace of its own, which nobody clears.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.graph(graph, stream=stream):
            result = run(batch)
    except Exception as error:
        _end_capture(setting.device, graph)
        raise CaptureError(f"{type(error).__name__}: {error}") from None
    finally:
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_clearCublasWorkspaces()

    def replay(_: Batch) -> Any:
        graph.replay()
        return result

    return replay


def _check_no_waiting(run: Iteration, batch: Batch) -> None:
    """Raise CaptureError if an iteration waits for the device, as copies from pageable memory of the host do."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(batch)
    except RuntimeError as error:
        raise CaptureError(f"an iteration waits for the device: {str(error).splitlines()[0]}") from None
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _end_capture(device: torch.device, graph: torch.cuda.CUDAGraph) -> None:
    """Have the allocator leave a capture that failed."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device.index or 0, graph.pool())
