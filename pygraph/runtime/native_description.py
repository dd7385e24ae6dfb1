"""The description of a region's graph, which C++ reads: nodes whose parameters change, memory for results, the launch.

What is described here is the same where a whole call is served by C++ and where only the replay is.
"""

# pyright: reportPrivateUsage=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pygraph.ir.descriptors import TensorSpec
from pygraph.runtime.body import RegionBody
from pygraph.runtime.discovery import FreshMemory
from pygraph.runtime.driver import Driver, Pool
from pygraph.runtime.pointers import Patcher
from pygraph.runtime.recorded_graph import RecordedGraph
from pygraph.runtime.saved_memory import SavedMemory


class DescribedGraph(Protocol):
    """The attributes of a `pygraph.runtime.capture.RegionGraph` that are described."""

    body: RegionBody
    driver: Driver
    pool: Pool
    graph: RecordedGraph
    patcher: Patcher
    slots: list[int]
    memory: list[FreshMemory]
    views: list[tuple[int, TensorSpec]]
    lazy: dict[int, tuple[bool, bool]]
    outputs_are_memory: bool
    saved: SavedMemory | None

    @property
    def reuses_outputs(self) -> bool:
        """Whether outputs are in the same memory at every replay."""
        ...


def describe_graph(
    graph: DescribedGraph, inputs: Sequence[int], numbers: Sequence[tuple[Any, ...]]
) -> dict[str, Any] | None:
    """Describe the replay of a graph, as `native/replay.h` reads it; None if only Python can replay it.

    Args:
        graph: The graph, which must live as long as the description is used.
        inputs: The leaf of each of its inputs.
        numbers: Where each of its numbers comes from, as `native/node_parameters.h` reads it.
    """
    if graph.reuses_outputs or graph.lazy:
        return None  # results are not in fresh memory, or are read in a way that is not described
    parameters, launch = _parameters(graph), graph.graph.native_launch()
    if parameters is None or launch is None or graph.driver.native_stream() is None:
        return None
    commits, slots, values = parameters
    return {
        "inputs": tuple(inputs[position] for position in graph.slots),
        "memory": _memory(graph),
        "keeps": None if graph.saved is None else _saved_memory(graph.saved),
        "slots": slots,
        "numbers": tuple((source, *cells) for source, cells in zip(numbers, values, strict=True)),
        "commits": commits,
        "synced": ctypes.addressof(graph.patcher.synced),
        "launch": launch,
        "outputs": _outputs(graph),
    }


def describe_stream(driver: Driver, pool: Pool) -> dict[str, Any] | None:
    """Functions that read the current stream, and the stream of the last replay; None on devices without streams.

    On any other stream, or one that is being captured, Python serves the call: a replay has to wait, or must not run.
    """
    stream = driver.native_stream()
    if stream is None:
        return None
    current_stream, is_capturing = stream
    return {
        "last_stream": ctypes.addressof(pool.last_stream),  # pyright: ignore
        "is_capturing": is_capturing,
        "current_stream": current_stream,
        "device_index": driver.device.index or 0,
        "owner": pool,
    }


def _memory(graph: DescribedGraph) -> tuple[tuple[Any, ...], ...]:
    """The memory of results: its dtype and device, sizes and strides, and its position among that of saved tensors."""
    saved = graph.saved
    return tuple(
        (
            _empty(one.spec.dtype, one.spec.device),
            one.spec.shape,
            one.spec.stride,
            None if saved is None else saved.position(number),
        )
        for number, one in enumerate(graph.memory)
    )


def _saved_memory(saved: SavedMemory) -> dict[str, Any]:
    """The memory of saved tensors, which the plan shares with calls in Python."""
    return {
        "bases": saved.bases,
        "lent": saved.lent,
        "streams": ctypes.addressof(saved.streams),
        "is_keeper": ctypes.addressof(saved.is_keeper),
        "keep": saved.keep,
    }


def _outputs(graph: DescribedGraph) -> tuple[tuple[int, tuple[Any, ...] | None], ...]:
    """The memory of each output, and the view of it; None if the output is all of it, and nothing else lies there."""
    count = collections.Counter(number for number, _ in graph.views)
    layouts = [(one.spec.shape, one.spec.stride, 0) for one in graph.memory]
    views = [(number, (spec.shape, spec.stride, spec.offset)) for number, spec in graph.views]
    return tuple(
        (number, None if graph.outputs_are_memory or (count[number] == 1 and view == layouts[number]) else view)
        for number, view in views
    )


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor of a dtype and device, which plans share and hold a reference to."""
    return torch.empty(0, dtype=dtype, device=device)


def _parameters(graph: DescribedGraph) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]] | None:
    """Commits, and for each slot and each number its cells and commits; None if Python must set a node's parameters."""
    patcher = graph.patcher
    if len(patcher.cells) != len(graph.slots) + len(graph.memory):
        return None
    index: dict[int, int] = {}
    commits: list[tuple[int, ...]] = []
    for node in dict.fromkeys(n for nodes in (*patcher.slot_nodes, *patcher.number_nodes) for n in nodes):
        commit = graph.graph.native_commit(node)
        if commit is None:
            return None
        index[node] = len(commits)
        commits.append(dataclasses.astuple(commit))

    def described(cells: Sequence[Any], nodes: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        return tuple(
            (tuple(its_cells), tuple(index[n] for n in dict.fromkeys(its_nodes)))
            for its_cells, its_nodes in zip(cells, nodes, strict=True)
        )

    return (
        tuple(commits),
        described(patcher.cells, patcher.slot_nodes),
        described(patcher.number_cells, patcher.number_nodes),
    )
