"""Nodes of captured graphs that draw the mask of a dropout: they need not run the dropout."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterable
from typing import Any

import torch

from pygraph.runtime.cuda.api import check, cu
from pygraph.runtime.cuda.kernels import THREADS, launch_params
from pygraph.runtime.cuda.nodes import KernelParams, replace_by_kernel

# Eager's kernel, by its mangled name: floats of any width, indices of 32 bits, one dimension, so many elements at once,
# a mask of booleans. Its arguments are three descriptions of tensors, the number of elements, the probability to keep,
# and the state of the generator. Checked with torch 2.11 and 2.13.
_EAGERS = re.compile(r"fused_dropout_kernel_vecI.*?jLi1ELi(\d+)EbE")


def draw_masks_alone(graph: Any, nodes: list[Any], spans: Iterable[tuple[int, int]], device: torch.device) -> list[Any]:
    """Replace nodes that draw a mask by ones that do nothing else; return ``nodes`` with those instead.

    Args:
        graph: The graph, which has not been instantiated.
        nodes: Its nodes, in the order in which they were captured.
        spans: The first node of each mask, and the one behind its last.
        device: The device.
    """
    nodes = list(nodes)
    for first, behind in spans:
        if behind == first + 1:
            nodes[first] = _replacement(graph, nodes[first], device)
    return nodes


def _replacement(graph: Any, node: Any, device: torch.device) -> Any:
    if check(cu.cuGraphNodeGetType(node)) != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        return node
    eager = KernelParams(node)
    arguments = _arguments(eager)
    if arguments is None:
        return node
    params, _keep = launch_params("pygraph_dropout_mask", int(eager.params.gridDimX), arguments, device)
    return replace_by_kernel(graph, node, params)


def _arguments(eager: KernelParams) -> list[Any] | None:
    """The arguments of our kernel, of those of eager's; None if it is another one, or launched otherwise."""
    found = _EAGERS.search(eager.name)
    if found is None or len(eager.arguments) != 6 or int(eager.params.blockDimX) != THREADS:
        return None
    values = [eager.buffer.raw[position : position + size] for position, _, size in eager.arguments]
    _, _, mask, count, keep, state = values
    wide = int(found[1])
    if wide % 4 or len(count) != 4 or len(keep) != 4 or len(state) != 32:
        return None
    # at::PhiloxCudaState: two addresses, which hold seed and offset where it was captured, what is to be added to the
    # offset, and whether it was.
    seed, offset, intragraph, captured = struct.unpack("<QQQ?7x", state)
    if not captured:
        return None
    return [
        ctypes.c_uint64(struct.unpack_from("<Q", mask)[0]),
        ctypes.c_uint64(seed),
        ctypes.c_uint64(offset),
        ctypes.c_uint64(intragraph),
        ctypes.c_uint32(struct.unpack("<I", count)[0]),
        ctypes.c_float(struct.unpack("<f", keep)[0]),
        ctypes.c_uint32(wide),
    ]
