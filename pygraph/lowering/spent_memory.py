"""Temporaries of a graph of kernels in the memory of inputs that are spent: saved tensors that a backward has read.

A graph's pool has the memory of all temporaries that live at the same time, and keeps it. In a backward, saved tensors
die as temporaries are made, and nobody asks for them again: then the pool needs less, and less memory is touched.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import argument_nodes, root

LARGE = 2**16
"""From so many bytes on, a temporary is placed: each has pointers that change with those to the input."""

_GRANULE = 512
"""Temporaries begin at multiples of this many bytes behind the beginning of an input, as torch's allocator has it."""


def reuse_spent_memory(graph: fx.Graph, spent: Collection[fx.Node]) -> None:
    """Have temporaries lie in inputs from where these are not read any more.

    IR before::

        def program(saved, grad):
            empty_strided = aten.empty_strided.default([8], [1], dtype=torch.float32, device=device("cuda:0"))
            launch = pygraph.launch("triton_poi_fused_mul_0", [empty_strided], [saved, grad], [])
            empty_strided_1 = aten.empty_strided.default([8], [1], dtype=torch.float32, device=device("cuda:0"))
            launch_1 = pygraph.launch("triton_poi_fused_sin_1", [empty_strided_1], [empty_strided], [])
            …

    IR after, where ``empty_strided_1`` is no result::

        def program(saved, grad):
            …
            scratch = pygraph.scratch(saved, [8], [1], 0, torch.float32)
            launch_1 = pygraph.launch("triton_poi_fused_sin_1", [scratch], [empty_strided], [])
            …

    Args:
        graph: A graph of kernels and allocations.
        spent: Placeholders whose values nobody needs after the graph, and whose memory nothing else shares.
    """
    last = _last_uses(graph)
    free = _FreeMemory()
    ending: dict[fx.Node, list[tuple[fx.Node, int, int]]] = {}
    for node in spent:
        spec: TensorSpec = node.meta["spec"]
        if spec.nbytes >= LARGE and _is_plain(spec):
            ending.setdefault(last[node], []).append((node, 0, spec.nbytes // _GRANULE * _GRANULE))
    for node in list(graph.nodes):
        if _is_large_temporary(node, last):
            size = -(-node.meta["spec"].nbytes // _GRANULE) * _GRANULE
            place = free.take(size)
            if place is not None:
                end = last[node]
                _replace(graph, node, *place)
                ending.setdefault(end, []).append((*place, size))
        for piece in ending.pop(node, ()):
            free.add(*piece)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """By the node that makes some memory, the last node that takes it, or a view of it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[root(node)] = node
        for argument in argument_nodes(node):
            last[root(argument)] = node
    return last


def _is_large_temporary(node: fx.Node, last: dict[fx.Node, fx.Node]) -> bool:
    if node.target is not torch.ops.aten.empty_strided.default or last[node].op == "output":
        return False
    spec: TensorSpec = node.meta["spec"]
    return spec.nbytes >= LARGE and _is_plain(spec)


def _is_plain(spec: TensorSpec) -> bool:
    """Whether all memory from the first element to the last is the tensor's, and holds no index."""
    is_inexact = spec.dtype.is_floating_point or spec.dtype.is_complex
    return is_inexact and not spec.has_gaps and not spec.overlaps_itself


def _replace(graph: fx.Graph, node: fx.Node, memory: fx.Node, start: int) -> None:
    spec: TensorSpec = node.meta["spec"]
    with graph.inserting_before(node):
        args = (memory, list(spec.shape), list(spec.stride), start, spec.dtype)
        scratch = graph.call_function(torch.ops.pygraph.scratch.default, args)
    scratch.meta = dict(node.meta)
    node.replace_all_uses_with(scratch)
    graph.erase_node(node)


@dataclasses.dataclass
class _FreeMemory:
    """Parts of spent inputs in which nothing lies now.

    Attributes:
        pieces: By input, where each begins and ends, in order.
    """

    pieces: dict[fx.Node, list[tuple[int, int]]] = dataclasses.field(default_factory=dict[fx.Node, Any])
    _used: set[fx.Node] = dataclasses.field(default_factory=set[fx.Node])

    def add(self, memory: fx.Node, start: int, size: int) -> None:
        """Note that a part is free, and whole with what is free beside it."""
        pieces, end = self.pieces.setdefault(memory, []), start + size
        index = bisect.bisect(pieces, (start, end))
        if index < len(pieces) and pieces[index][0] == end:
            end = pieces.pop(index)[1]
        if index and pieces[index - 1][1] == start:
            index -= 1
            start = pieces.pop(index)[0]
        if start < end:
            pieces.insert(index, (start, end))

    def take(self, size: int) -> tuple[fx.Node, int] | None:
        """The smallest part that has room, of an input that is written to anyway if one has; None if there is none."""
        found = min(
            (
                (memory not in self._used, end - start, number, start)
                for number, (memory, pieces) in enumerate(self.pieces.items())
                for start, end in pieces
                if end - start >= size
            ),
            default=None,
        )
        if found is None:
            return None
        _, length, number, start = found
        memory = list(self.pieces)[number]
        self.pieces[memory].remove((start, start + length))
        self.add(memory, start + size, length - size)
        self._used.add(memory)
        return memory, start
