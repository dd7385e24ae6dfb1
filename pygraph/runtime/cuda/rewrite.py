"""Replacing nodes of a captured graph that could not be patched by kernels that can.

An executable graph takes new addresses for copy and fill nodes of one dimension only
(``cuGraphExecMemcpyNodeSetParams``), so those of more dimensions become kernels before it is made.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from pygraph.runtime.cuda.api import check, cu
from pygraph.runtime.cuda.kernels import launch_params
from pygraph.runtime.cuda.nodes import replace_by_kernel


def replace_unpatchable(graph: Any, nodes: list[Any], device: torch.device) -> list[Any]:
    """Replace copies and fills of several dimensions by kernels; return ``nodes`` with those kernels instead."""
    return [_replacement(graph, node, device) for node in nodes]


def _replacement(graph: Any, node: Any, device: torch.device) -> Any:
    kind = check(cu.cuGraphNodeGetType(node))
    if kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY:
        made = _copy_kernel(check(cu.cuGraphMemcpyNodeGetParams(node)), device)
    elif kind == cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
        made = _fill_kernel(check(cu.cuGraphMemsetNodeGetParams(node)), device)
    else:
        return node
    if made is None:
        return node
    params, _keep = made
    return replace_by_kernel(graph, node, params)


def _copy_kernel(copy: Any, device: torch.device) -> tuple[Any, Any] | None:
    """A kernel for a copy of several dimensions between device addresses; None for other copies."""
    on_device = (cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED)
    if copy.srcMemoryType not in on_device or copy.dstMemoryType not in on_device:
        return None
    if copy.Height * copy.Depth <= 1:
        return None
    target = int(copy.dstDevice) + copy.dstXInBytes + copy.dstPitch * (copy.dstY + copy.dstHeight * copy.dstZ)
    source = int(copy.srcDevice) + copy.srcXInBytes + copy.srcPitch * (copy.srcY + copy.srcHeight * copy.srcZ)
    numbers = (target, source, copy.dstPitch, copy.dstHeight, copy.srcPitch, copy.srcHeight, copy.WidthInBytes)
    arguments = [ctypes.c_uint64(number) for number in (*numbers, copy.Height)]
    return launch_params("pygraph_copy_3d", copy.Height * copy.Depth, arguments, device)


def _fill_kernel(fill: Any, device: torch.device) -> tuple[Any, Any] | None:
    """A kernel for a fill of several rows; None for other fills."""
    if fill.height <= 1:
        return None
    arguments = [
        ctypes.c_uint64(int(fill.dst)),
        ctypes.c_uint64(fill.pitch),
        ctypes.c_uint32(fill.value),
        ctypes.c_uint32(fill.elementSize),
        ctypes.c_uint64(fill.width),
    ]
    return launch_params("pygraph_fill_2d", fill.height, arguments, device)
