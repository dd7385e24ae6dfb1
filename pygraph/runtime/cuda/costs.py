"""Times of the mechanisms on this machine: measured once, with a small graph, and stored in the cache directory."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from pygraph.process.cache import cache_directory, make_private
from pygraph.process.trust import distrust
from pygraph.runtime.cuda import captures
from pygraph.runtime.cuda.api import check, cu
from pygraph.runtime.cuda.nodes import KernelParams, graph_nodes, node_params
from pygraph.runtime.cuda.timing import device_time, synchronize
from pygraph.runtime.cuda.utilization import busy_processes
from pygraph.runtime.cuda.wiring import add_wiring
from pygraph.runtime.driver import Costs, patiently
from pygraph.runtime.recorded_graph import Wiring

_VERSION = 4  # of what is measured, and how
_NODES = 64
_REPLAYS = 4
_ROUNDS = 5
_SHORTEST = 0.1  # microseconds of a node: less is not believed

# As measured on an H200 with no other work, with a fast host.
TYPICAL = Costs(
    replay=2.95, host_node=0.235, update=2.35, update_word=0.0147, table=2.35, load=0.03, copy=1.98, copy_rate=1.53e6,
    allocation=1.13, upload=0.15,
)  # fmt: skip


def costs_on(device: torch.device) -> Costs:
    """The costs on a device: halfway between those measured there and typical ones, see `tempered`.

    They are measured once and stored in the user's cache directory for pygraph, or in ``PYGRAPH_CACHE_DIR``.
    """
    return tempered(measured_costs(device))


def tempered(costs: Costs) -> Costs:
    """The geometric mean of costs and typical ones.

    Two measurements on one machine differ by a factor of two, as a host's speed changes and other work uses the device,
    and a choice between mechanisms is kept for long. Halfway, fewer choices are wrong than by the measurement.

    >>> slow = dataclasses.replace(TYPICAL, host_node=4 * TYPICAL.host_node)
    >>> tempered(slow).host_node / TYPICAL.host_node
    2.0
    """
    measured, typical = dataclasses.asdict(costs), dataclasses.asdict(TYPICAL)
    # Launches are not measured: they are slower by as much as another operation of torch's.
    measured["launch"] = TYPICAL.launch * costs.allocation / TYPICAL.allocation
    return Costs(**{name: math.sqrt(max(measured[name], typical[name] / 100) * typical[name]) for name in typical})


def measured_costs(device: torch.device) -> Costs:
    """The costs as they were measured on a device; from the cache directory if that was before."""
    return _measured_costs(0 if device.index is None else device.index)  # pyright: ignore[reportUnnecessaryComparison]


@functools.cache
def _measured_costs(index: int) -> Costs:
    path = _path(index)
    try:
        if distrust(path) is None:
            return Costs(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # not measured yet, or not written by us
        pass
    torch.cuda.empty_cache()  # of what trials have left, beside which there has to be memory to copy
    costs = _measure(torch.device("cuda", index))
    torch.cuda.empty_cache()
    # Where other work was in the way, they are measured again in the next process.
    if min(costs.update, costs.copy) <= _SHORTEST or busy_processes(torch.device("cuda", index)) is not None:
        return costs
    try:
        make_private(path.parent)
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
        small = torch.empty(2, 1 << 12, dtype=torch.uint8, device=device)
        large = torch.empty(2, 1 << 26, dtype=torch.uint8, device=device)
        plain = _Chain(device, None)
        chains = {
            "plain": plain,
            "one update": _Chain(device, lambda words: Wiring(1, updates=((0, *words[0]),))),
            "updates": _Chain(
                device, lambda words: Wiring(_NODES, updates=tuple((i, *word) for i, word in enumerate(words)))
            ),
            "small copy": _copying_chain(device, small),
            "large copy": _copying_chain(device, large),
        }
        send, call_nothing = plain.sending()
        runs: dict[str, Callable[[], float]] = {
            name: functools.partial(device_time, chain.replay, device) for name, chain in chains.items()
        }
        runs["replays"] = lambda: _host_time(lambda: [plain.replay() for _ in range(_REPLAYS)], device)
        runs["sent"] = lambda: _host_time(send, device)
        runs["calls"] = lambda: _host_time(call_nothing, device)
        runs["allocations"] = lambda: _host_time(
            lambda: [torch.empty(1024, device=device) for _ in range(_NODES)], device
        )
        least = _least(runs)
    added = {name: max(least[name] - least["plain"], _SHORTEST) for name in chains}
    per_word = max((added["updates"] - added["one update"]) / (_NODES - 1), 0.0)
    update = max(added["one update"] - per_word, _SHORTEST)
    return Costs(
        replay=least["replays"] / _REPLAYS,
        host_node=max(least["sent"] - least["calls"], 0.0) / _NODES,
        update=update,
        update_word=per_word,
        # Filling a table is the same node without the updates. A load is too short to time on its own: on an H200
        # a kernel of 129 pointers took 4 µs longer.
        table=update,
        load=TYPICAL.load,
        copy=added["small copy"],
        copy_rate=large[0].nbytes / max(added["large copy"] - added["small copy"], 1.0),
        # From Python; the call path needs half of that, as it has no arguments to look at (1.0 µs on an H200).
        allocation=least["allocations"] / _NODES / 2,
        # Of rows of 16 to 40 calls, whose graphs have 32 and 128 nodes, on an H200. Shorter rows, which could be
        # measured here, show nothing of it.
        upload=TYPICAL.upload,
    )


def _least(runs: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The least time of each run, in rounds of all of them: other work only adds to it, and not to all rounds."""
    rounds = [{name: run() for name, run in runs.items()} for _ in range(_ROUNDS)]
    return {name: min(times[name] for times in rounds) for name in runs}


def _host_time(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a run on the host while the device is idle at first: the least of a few after a first one."""
    synchronize(device)
    times: list[float] = []
    for index in range(6):
        start = time.perf_counter()
        run()
        if index:
            times.append((time.perf_counter() - start) * 1e6)
    return min(times)


def _copying_chain(device: torch.device, pair: torch.Tensor) -> _Chain:
    """A chain before which one row of a pair is copied into the other."""
    return _Chain(device, lambda words: Wiring(1, copies_in=((0, pair[1].data_ptr(), pair[1].nbytes),)), source=pair[0])


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
        self._params, self._words = params, words

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        captures.capture(graph, torch.cuda.graph_pool_handle(), self._launch)
        return graph

    def _launch(self) -> None:
        for _ in range(_NODES):
            torch.add(self._x, 1, out=self._y)

    def replay(self) -> None:
        self._graph.replay()

    def sending(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Two runs: one sends every node, with another address each time; one does the same but calls no driver.

        Raises:
            CaptureError: If the driver refuses a node: what is timed would not be what is sent.
        """
        cells = [
            ctypes.c_uint64.from_address(ctypes.addressof(self._params[node].buffer) + at) for node, at in self._words
        ]
        commits = [one.native(self._executable) for one in self._params if isinstance(one, KernelParams)]
        send = _FUNCTION(commits[0].function)
        # Any function of C that does nothing: calling it costs what calling the driver costs beside the driver's work.
        nothing = _FUNCTION(ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or 0)
        for commit in commits:
            check((cu.CUresult(send(commit.executable, commit.node, commit.params)),))

        def call_for_each(function: Callable[..., int]) -> None:
            first = self._x.data_ptr()
            address = self._other.data_ptr() if cells[0].value == first else first
            for cell, commit in zip(cells, commits, strict=True):
                cell.value = address
                function(commit.executable, commit.node, commit.params)

        return functools.partial(call_for_each, send), functools.partial(call_for_each, nothing)


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
