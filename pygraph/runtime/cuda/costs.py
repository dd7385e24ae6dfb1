"""Times of the mechanisms on this machine: measured once, with a small graph, and stored in the cache directory."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pygraph.process.cache import cache_directory
from pygraph.runtime.cuda import captures
from pygraph.runtime.cuda.api import check, cu
from pygraph.runtime.cuda.nodes import KernelParams, NodeParams, graph_nodes, node_params
from pygraph.runtime.cuda.timing import device_time
from pygraph.runtime.cuda.wiring import add_wiring
from pygraph.runtime.driver import Costs, patiently
from pygraph.runtime.recorded_graph import Wiring

_VERSION = 3  # of what is measured, and how
_NODES = 64
_REPLAYS = 4


def measured_costs(device: torch.device) -> Costs:
    """The costs on a device; from the cache directory if they were measured before.

    The directory is the user's cache directory for pygraph, or ``PYGRAPH_CACHE_DIR``.
    """
    return _measured_costs(0 if device.index is None else device.index)  # pyright: ignore[reportUnnecessaryComparison]


@functools.cache
def _measured_costs(index: int) -> Costs:
    path = _path(index)
    try:
        return Costs(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # not measured yet, or not written by us
        pass
    costs = _measure(torch.device("cuda", index))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(dataclasses.asdict(costs)))
        scratch.replace(path)
    except OSError:  # a read-only home: measured again in the next process
        pass
    return costs


def _path(index: int) -> Path:
    name = re.sub(r"\W+", "-", torch.cuda.get_device_name(index))
    return cache_directory() / f"costs-{_VERSION}-{name}-{check(cu.cuDriverGetVersion())}-{torch.__version__}.json"


def _measure(device: torch.device) -> Costs:
    """Time a chain of small kernels: as it is, its nodes sent, updated by the device, and with copies before it."""
    with torch.cuda.device(device), torch.no_grad():
        plain = _Chain(device, None)
        one = _Chain(device, lambda words: Wiring(1, updates=((0, *words[0]),)))
        many = _Chain(device, lambda words: Wiring(_NODES, updates=tuple((i, *w) for i, w in enumerate(words))))
        small = torch.empty(2, 1 << 12, dtype=torch.uint8, device=device)
        large = torch.empty(2, 1 << 26, dtype=torch.uint8, device=device)
        copies = [
            _Chain(device, lambda words, t=t: Wiring(1, copies_in=((0, t[1].data_ptr(), t[1].nbytes),)), t[0])
            for t in (small, large)
        ]
        base = device_time(plain.replay, device)
        update_one, update_many, copy_small, copy_large = (
            max(device_time(graph.replay, device) - base, 0.1) for graph in (one, many, *copies)
        )
        per_word = max((update_many - update_one) / (_NODES - 1), 0.0)
        replay = _host_time(lambda: [plain.replay() for _ in range(_REPLAYS)]) / _REPLAYS
        torch.cuda.synchronize(device)
        sending = max(_host_time(plain.send) - _host_time(plain.call_nothing), 0.0) / _NODES
        return Costs(
            replay=replay,
            host_node=sending,
            update=max(update_one - per_word, 0.1),
            update_word=per_word,
            # Filling a table is the same node without the updates. A load is too short to time on its own: on an H200
            # a kernel of 129 pointers took 4 µs longer.
            table=max(update_one - per_word, 0.1),
            load=0.03,
            copy=copy_small,
            copy_rate=large[0].nbytes / max(copy_large - copy_small, 1.0),
            # From Python; the call path needs half of that, as it has no arguments to look at (1.0 µs on an H200).
            allocation=_host_time(lambda: [torch.empty(1024, device=device) for _ in range(_NODES)]) / _NODES / 2,
            # Of rows of 16 to 40 calls, whose graphs have 32 and 128 nodes, on an H200. Shorter rows, which could be
            # measured here, show nothing of it.
            upload=0.15,
        )


def _host_time(run: Callable[[], object]) -> float:
    """Microseconds of a run on the host: the least of a few after one that warms up, as other work only adds to it."""
    times: list[float] = []
    for index in range(6):
        start = time.perf_counter()
        run()
        if index:
            times.append((time.perf_counter() - start) * 1e6)
    return min(times)


class _Chain:
    """A captured chain of small kernels.

    Args:
        device: Where it runs.
        wiring: The nodes to add to it, given the first argument word of each kernel; None for none.
        source: The tensor whose address every value of the wiring is; None for the kernels' own input.
    """

    def __init__(
        self,
        device: torch.device,
        wiring: Callable[[list[tuple[int, int]]], Wiring] | None,
        source: torch.Tensor | None = None,
    ) -> None:
        self._x, self._other, self._y = torch.zeros(3, 1024, device=device)
        torch.add(self._x, 1, out=self._y)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(captures.capture_stream(device)):
            self._graph = patiently(self._capture, captures.PAUSES)
        raw = cu.CUgraph(self._graph.raw_cuda_graph())
        params = [params for node in graph_nodes(raw) for params in node_params(node)]
        address = self._x.data_ptr().to_bytes(8, "little")
        words = [(node, one.buffer.raw.index(address)) for node, one in enumerate(params)]
        self._added = None
        if wiring is not None:
            self._added = add_wiring(raw, params, wiring(words), device)
        self._graph.instantiate()
        self._executable = cu.CUgraphExec(self._graph.raw_cuda_graph_exec())
        if self._added is not None:
            value = self._x if source is None else source
            for added, values in self._added.nodes:
                for index in range(len(values)):
                    ctypes.c_uint64.from_address(ctypes.addressof(added.buffer) + 8 * index).value = value.data_ptr()
                added.commit(self._executable)
        check(cu.cuGraphUpload(self._executable, cu.CUstream(torch.cuda.current_stream(device).cuda_stream)))
        torch.cuda.synchronize(device)
        self._prepare_sending(params, words)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        captures.capture(graph, torch.cuda.graph_pool_handle(), self._launch)
        return graph

    def _launch(self) -> None:
        for _ in range(_NODES):
            torch.add(self._x, 1, out=self._y)

    def replay(self) -> None:
        self._graph.replay()

    def _prepare_sending(self, params: Sequence[NodeParams], words: Sequence[tuple[int, int]]) -> None:
        cells = [ctypes.c_uint64.from_address(ctypes.addressof(params[node].buffer) + at) for node, at in words]
        commits = [one.native(self._executable) for one in params if isinstance(one, KernelParams)]
        self._params = params
        self._sent = [(cell, c.executable, c.node, c.params) for cell, c in zip(cells, commits, strict=True)]
        self._send = _FUNCTION(commits[0].function)
        # Any function of C that does nothing: calling it costs what calling the driver costs beside the driver's work.
        self._nothing = _FUNCTION(ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or 0)

    def send(self) -> None:
        """Send every node, with another address than before."""
        self._call_for_each(self._send)

    def call_nothing(self) -> None:
        """Call a function that does nothing as often as `send` calls the driver."""
        self._call_for_each(self._nothing)

    def _call_for_each(self, function: Callable[..., int]) -> None:
        address = self._other.data_ptr() if self._sent[0][0].value == self._x.data_ptr() else self._x.data_ptr()
        for cell, executable, node, params in self._sent:
            cell.value = address
            function(executable, node, params)


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
