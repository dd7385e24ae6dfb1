"""Memory of a pool that a recording holds until the operations come whose results are to lie there.

An allocator gives a result memory that values before it have left. Replays write those values there again, so nothing
that is kept may lie there. A place is taken before the first operation, and is free only while its operation runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import root
from pygraph.runtime.body import RegionBody

_ATTEMPTS = 256
"""So many pieces of memory are tried for a place, at most."""


def sizes_of_results(body: RegionBody, nodes: frozenset[fx.Node]) -> dict[int, list[int]]:
    """Bytes of the memory of some outputs of a region, by the operation that allocates it."""
    found: dict[int, list[int]] = {}
    origins: set[fx.Node] = set()
    for index, node in enumerate(body.outputs):
        origin = root(node)
        spec = origin.meta.get("spec")
        if node in nodes and origin not in origins and isinstance(spec, TensorSpec) and spec.nbytes:
            origins.add(origin)
            found.setdefault(body.producer(index), []).append(spec.nbytes)
    return found


class ResultPlaces:
    """Places of a recording in progress, in the pool that it allocates from.

    Args:
        sizes: Bytes of the places, by operation.
        taken: Address and size of memory where no place may be, as other graphs use it.
        device: The device.

    Attributes:
        extents: Address and size of the places, by operation.
    """

    def __init__(
        self, sizes: Mapping[int, Sequence[int]], taken: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        self._device = device
        self._open: list[torch.Tensor] = []
        avoided: list[torch.Tensor] = []
        self._places: dict[int, list[torch.Tensor]] = {}
        for op, its in sizes.items():
            places = (self._place(size, taken, avoided) for size in its)
            self._places[op] = [place for place in places if place is not None]
        self.extents = {op: [_extent(place) for place in places] for op, places in self._places.items()}

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _place(self, size: int, taken: Sequence[tuple[int, int]], avoided: list[torch.Tensor]) -> torch.Tensor | None:
        for _ in range(_ATTEMPTS):
            place = self._bytes(size)
            if not any(_meet(place, extent) for extent in taken):
                return place
            avoided.append(place)
        return None

    def concerns(self, op: int) -> bool:
        """Whether something is to be done before an operation."""
        return bool(self._open) or op in self._places

    def move_to(self, op: int) -> None:
        """Have the results of an operation be allocated in its places: whatever fits better is taken meanwhile."""
        self._open.clear()
        places = self._places.pop(op, [])
        extents = [_extent(place) for place in places]
        places.clear()
        found: list[torch.Tensor] = []
        for _, size in extents:
            for _ in range(_ATTEMPTS):
                piece = self._bytes(size)
                if any(_meet(piece, extent) for extent in extents):
                    found.append(piece)
                    break
                self._open.append(piece)


def _extent(place: torch.Tensor) -> tuple[int, int]:
    return place.data_ptr(), place.numel()


def _meet(piece: torch.Tensor, extent: tuple[int, int]) -> bool:
    """Whether a piece of memory and another, given by address and size, have bytes in common."""
    start, size = extent
    return piece.data_ptr() < start + size and start < piece.data_ptr() + piece.numel()
