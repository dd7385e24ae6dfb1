"""Nodes of our own in a captured CUDA graph: one that updates others and fills the table, one that copies.

Both take their addresses by value, in a struct, so that the host changes all of them by sending one node.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.runtime.cuda.api import check, cu
from pygraph.runtime.cuda.kernels import CAPACITIES, CHUNK, launch_params
from pygraph.runtime.cuda.nodes import KernelParams, NodeParams, graph_nodes, listed
from pygraph.runtime.launched_kernels import rebuilt_kernel_of
from pygraph.runtime.recorded_graph import Wiring
from pygraph.runtime.trampoline import Refused, trampoline


class _AddedParams(KernelParams):
    """A kernel of ours; its buffer begins with the addresses."""

    def __init__(self, node: Any, keep: object) -> None:
        super().__init__(node)
        self._tensors = keep


@dataclasses.dataclass(frozen=True)
class Added:
    """Nodes that were added, each with the values that its first bytes hold, and the objects that the nodes use."""

    nodes: list[tuple[KernelParams, list[int]]]
    keep: list[object]


def add_wiring(
    graph: Any,
    params: Sequence[NodeParams],
    wiring: Wiring,
    device: torch.device,
) -> Added:
    """Add the nodes of a wiring to a captured graph that has not been launched with them yet.

    Raises:
        CaptureError: A node cannot be updated by the device, or has no trampoline.
    """
    first = listed(cu.cuGraphGetRootNodes, graph)
    last = [node for node in graph_nodes(graph) if not listed(cu.cuGraphNodeGetDependentNodes, node)]
    added = Added([], [])
    targets = _update_targets(params, wiring)
    targets += _table_targets(params, wiring, device, added.keep)
    if targets:
        _add(graph, added, "pygraph_update", targets, _one_block, device, after=[], before=first)
    copies = [(fixed, nbytes, value) for value, fixed, nbytes in wiring.copies_in]
    if copies:
        _add(graph, added, "pygraph_copy_in", copies, _chunked, device, after=[], before=first)
    copies = [(fixed, nbytes, value) for value, fixed, nbytes in wiring.copies_out]
    if copies:
        _add(graph, added, "pygraph_copy_out", copies, _chunked, device, after=last, before=[])
    return added


def _update_targets(params: Sequence[NodeParams], wiring: Wiring) -> list[tuple[int, int, int]]:
    """Make nodes updatable; per update, the node's handle on the device, the parameter's offset and the value."""
    handles: dict[int, int] = {}
    targets: list[tuple[int, int, int]] = []
    attribute = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE
    for value, node, offset in wiring.updates:
        kernel = params[node]
        assert isinstance(kernel, KernelParams)
        if node not in handles:
            wanted = cu.CUkernelNodeAttrValue()
            wanted.deviceUpdatableKernelNode.deviceUpdatable = 1
            check(cu.cuGraphKernelNodeSetAttribute(kernel.node, attribute, wanted))
            got = check(cu.cuGraphKernelNodeGetAttribute(kernel.node, attribute))
            handles[node] = int(got.deviceUpdatableKernelNode.devNode)
        targets.append((handles[node], kernel.argument_at(offset)[1], value))
    return targets


def _table_targets(
    params: Sequence[NodeParams],
    wiring: Wiring,
    device: torch.device,
    keep: list[object],
) -> list[tuple[int, int, int]]:
    """Replace kernels by their trampolines; return per value the address of its entry in the table."""
    if not wiring.loads:
        return []
    values = list(dict.fromkeys(value for value, _, _ in wiring.loads))
    table = torch.empty(len(values), dtype=torch.int64, device=device)
    keep.append(table)
    entry = {value: table.data_ptr() + 8 * index for index, value in enumerate(values)}
    for node in dict.fromkeys(node for _, node, _ in wiring.loads):
        kernel = params[node]
        assert isinstance(kernel, KernelParams)
        words = [(value, offset) for value, other, offset in wiring.loads if other == node]
        made = trampoline(rebuilt_kernel_of(kernel.function), [kernel.argument_at(offset)[0] for _, offset in words])
        if isinstance(made, Refused):
            raise CaptureError(f"{kernel.name} has no trampoline: {made.reason}")
        keep.append(made)
        kernel.params.func = cu.CUfunction(made.function)
        kernel.params.sharedMemBytes = made.shared
        kernel.params.blockDimX = made.block[0]
        for value, offset in words:
            address = ctypes.addressof(kernel.buffer) + offset
            ctypes.c_uint64.from_address(address).value = entry[value]
        kernel.commit_template()
    return [(0, entry[value], value) for value in values]


def _one_block(rows: list[list[int]]) -> int:
    return 1


def _chunked(rows: list[list[int]]) -> int:
    """Number the blocks that copy each segment; how many blocks there are."""
    blocks = 0
    for row in rows:
        row.append(blocks)
        blocks += -(-row[1] // CHUNK)
    return blocks


def _add(
    graph: Any,
    added: Added,
    name: str,
    rows: Sequence[tuple[int, int, int]],
    blocks: Callable[[list[list[int]]], int],
    device: torch.device,
    after: list[Any],
    before: list[Any],
) -> None:
    """Add as many nodes of one kernel as the values need; the third of each row is its value."""
    capacity = CAPACITIES[-1]
    values = list(dict.fromkeys(row[2] for row in rows))
    for start in range(0, len(values), capacity):
        mine = values[start : start + capacity]
        local = {value: index for index, value in enumerate(mine)}
        chosen = [[row[0], row[1], local[row[2]]] for row in rows if row[2] in local]
        size = CAPACITIES[bisect.bisect_left(CAPACITIES, len(mine))]
        grid = blocks(chosen)
        table = torch.tensor(chosen, dtype=torch.int64, device="cpu").to(device)
        words = (ctypes.c_uint64 * size)()
        pointer, count = ctypes.c_uint64(table.data_ptr()), ctypes.c_int32(len(chosen))
        params, _keep = launch_params(f"{name}_{size}", grid, (words, pointer, count), device)
        node = check(cu.cuGraphAddKernelNode(graph, after or None, len(after), params))
        if before:
            check(cu.cuGraphAddDependencies(graph, [node] * len(before), before, None, len(before)))
        added.nodes.append((_AddedParams(node, table), mine))
