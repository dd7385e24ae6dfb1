"""Memory of a pool that a recording reserves for some results until the operations come that make them.

An allocator gives a result memory that values before it have left. Replays write those values there again, so nothing
that lasts may be there. Reserved memory is taken before the first operation, and is free only while its own one runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import root
from pygraph.runtime.body import RegionBody

_ATTEMPTS = 256
"""So many pieces of memory are tried for a result, at most."""


def sizes_of_results(body: RegionBody, nodes: frozenset[fx.Node]) -> dict[int, list[int]]:
    """Bytes of the memory of some outputs of a region in a pool, by the operation that allocates it."""
    found: dict[int, list[int]] = {}
    origins = set(body.allocations)  # which lie outside of the pool
    for index, node in enumerate(body.outputs):
        origin = root(node)
        spec = origin.meta.get("spec")
        if node in nodes and origin not in origins and isinstance(spec, TensorSpec) and spec.nbytes:
            origins.add(origin)
            found.setdefault(body.producer(index), []).append(spec.nbytes)
    return found


class Reservations:
    """The reserved memory of a recording in progress, in the pool that it allocates from.

    Args:
        sizes: Bytes of the results, by operation.
        taken: Address and size of memory that other graphs use, of which nothing is reserved.
        device: The device.

    Attributes:
        extents: Address and size of what was reserved, by operation.
    """

    def __init__(
        self, sizes: Mapping[int, Sequence[int]], taken: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        self._device = device
        self._occupied: list[torch.Tensor] = []
        avoided: list[torch.Tensor] = []
        self._reserved: dict[int, list[torch.Tensor]] = {}
        for op, its in sizes.items():
            pieces = (self._reserve(size, taken, avoided) for size in its)
            self._reserved[op] = [piece for piece in pieces if piece is not None]
        self.extents = {op: [_extent(piece) for piece in pieces] for op, pieces in self._reserved.items()}

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _reserve(self, size: int, taken: Sequence[tuple[int, int]], avoided: list[torch.Tensor]) -> torch.Tensor | None:
        for _ in range(_ATTEMPTS):
            piece = self._bytes(size)
            if not any(_meet(piece, extent) for extent in taken):
                return piece
            avoided.append(piece)
        return None

    def concerns(self, op: int) -> bool:
        """Whether something is to be done before an operation."""
        return bool(self._occupied) or op in self._reserved

    def free_for(self, op: int) -> None:
        """Free what is reserved for an operation, and occupy meanwhile whatever the allocator would rather give it."""
        self._occupied.clear()
        reserved = self._reserved.pop(op, [])
        extents = [_extent(piece) for piece in reserved]
        reserved.clear()
        found: list[torch.Tensor] = []
        for _, size in extents:
            for _ in range(_ATTEMPTS):
                piece = self._bytes(size)
                if any(_meet(piece, extent) for extent in extents):
                    found.append(piece)
                    break
                self._occupied.append(piece)


def _extent(piece: torch.Tensor) -> tuple[int, int]:
    return piece.data_ptr(), piece.numel()


def _meet(piece: torch.Tensor, extent: tuple[int, int]) -> bool:
    """Whether a piece of memory and another, given by address and size, have bytes in common."""
    start, size = extent
    return piece.data_ptr() < start + size and start < piece.data_ptr() + piece.numel()
