"""The costs of mechanisms on this machine: measured once, with a small graph, and kept in the cache directory."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pygraph.process.cache import cache_directory
from pygraph.runtime.cuda import captures
from pygraph.runtime.cuda.api import check, cu
from pygraph.runtime.cuda.nodes import KernelParams, graph_nodes, node_params
from pygraph.runtime.cuda.timing import device_time
from pygraph.runtime.cuda.wiring import add_wiring
from pygraph.runtime.driver import Costs, patiently
from pygraph.runtime.recorded_graph import Wiring

_VERSION = 1  # of what is measured, and how
_NODES = 64


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
        plain = _chain(device, None)
        one = _chain(device, lambda words: Wiring(1, updates=((0, *words[0]),)))
        many = _chain(device, lambda words: Wiring(_NODES, updates=tuple((i, *w) for i, w in enumerate(words))))
        small = torch.empty(2, 1 << 12, dtype=torch.uint8, device=device)
        large = torch.empty(2, 1 << 26, dtype=torch.uint8, device=device)
        copies = [
            _chain(device, lambda words, t=t: Wiring(1, copies_in=((0, t[1].data_ptr(), t[1].nbytes),)), t[0])
            for t in (small, large)
        ]
        base = device_time(plain.replay, device)
        update_one, update_many, copy_small, copy_large = (
            max(device_time(graph.replay, device) - base, 0.1) for graph in (one, many, *copies)
        )
        start = time.perf_counter()
        for _ in range(20):
            plain.replay()
        replay = (time.perf_counter() - start) / 20 * 1e6
        torch.cuda.synchronize(device)
        per_word = max((update_many - update_one) / (_NODES - 1), 0.0)
        return Costs(
            replay=replay,
            host_node=plain.sending(),
            update=max(update_one - per_word, 0.1),
            update_word=per_word,
            # Filling a table is the same node without the updates, and a load is too short to time on its own.
            table=max(update_one - per_word, 0.1),
            load=0.1,
            copy=copy_small,
            copy_rate=large[0].nbytes / max(copy_large - copy_small, 1.0),
        )


class _chain:
    """A captured chain of small kernels; ``wiring`` gets the first argument word of each."""

    def __init__(
        self,
        device: torch.device,
        wiring: Callable[[list[tuple[int, int]]], Wiring] | None,
        source: torch.Tensor | None = None,
    ) -> None:
        self.x, self.y = torch.zeros(2, 1024, device=device)
        torch.add(self.x, 1, out=self.y)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(captures.capture_stream(device)):
            self._graph = patiently(self._capture, captures.PAUSES)
        raw = cu.CUgraph(self._graph.raw_cuda_graph())
        self._params = [params for node in graph_nodes(raw) for params in node_params(node)]
        words = [(node, params.buffer.raw.index(self._address)) for node, params in enumerate(self._params)]
        self._added = None
        if wiring is not None:
            self._added = add_wiring(raw, self._params, wiring(words), device)
        self._graph.instantiate()
        self._executable = cu.CUgraphExec(self._graph.raw_cuda_graph_exec())
        if self._added is not None:
            value = self.x if source is None else source
            for params, values in self._added.nodes:
                for index in range(len(values)):
                    ctypes.c_uint64.from_address(ctypes.addressof(params.buffer) + 8 * index).value = value.data_ptr()
                params.commit(self._executable)
        check(cu.cuGraphUpload(self._executable, cu.CUstream(torch.cuda.current_stream(device).cuda_stream)))
        torch.cuda.synchronize(device)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        captures.capture(graph, torch.cuda.graph_pool_handle(), self._launch)
        return graph

    def _launch(self) -> None:
        for _ in range(_NODES):
            torch.add(self.x, 1, out=self.y)

    @property
    def _address(self) -> bytes:
        return self.x.data_ptr().to_bytes(8, "little")

    def replay(self) -> None:
        self._graph.replay()

    def sending(self) -> float:
        """Host microseconds to send one node, as native code does it."""
        commits = [params.native(self._executable) for params in self._params if isinstance(params, KernelParams)]
        send = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(commits[0].function)
        start = time.perf_counter()
        for commit in commits:
            send(commit.executable, commit.node, commit.params)
        return (time.perf_counter() - start) / len(commits) * 1e6
