"""Shared memory of tensors: their storages' ranges of addresses overlap.

Storages that an allocator made never do. Those made over memory that is there already, by DLPack or
``__cuda_array_interface__``, may: two storages are one memory then, also where they begin at different addresses.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from pygraph.ir.descriptors import TensorSpec

Range: TypeAlias = tuple[int, int]
"""The first address, and the one after the last."""


def memory_range(tensor: torch.Tensor) -> Range:
    """The addresses of a tensor's storage; ``(0, 0)`` for one that has no memory to share."""
    if tensor.layout != torch.strided or not tensor.numel() or tensor._is_zerotensor():  # pyright: ignore
        return 0, 0  # as torch's zero tangents
    storage = tensor.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    return (start, start + size) if start and size else (0, 0)


def are_disjoint(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether certainly no two of the tensors share memory; cheap, as it is asked at every call."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    reach = 0
    for start, size in sorted([(storage.data_ptr(), storage.nbytes()) for storage in storages]):
        if start < reach:
            return False
        reach = start + size
    return True


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the storages of two tensors overlap."""
    (start, end), (other_start, other_end) = memory_range(one), memory_range(other)
    return start < other_end and other_start < end


def sharing(tensors: Iterable[tuple[int, torch.Tensor]]) -> list[list[int]]:
    """Groups of two or more tensors that are connected by shared memory, each tensor by the number given with it."""
    groups: list[list[int]] = []
    reach = 0
    for (start, end), number in sorted((memory_range(tensor), number) for number, tensor in tensors):
        if start == end:
            continue
        if start < reach:
            groups[-1].append(number)
        else:
            groups.append([number])
        reach = max(reach, end)
    return sorted(sorted(group) for group in groups if len(group) > 1)


def span_of(tensors: Sequence[torch.Tensor]) -> Range:
    """From the first to the last byte of the elements of tensors, not of their storages."""
    starts = [tensor.data_ptr() for tensor in tensors]
    ends = [start + TensorSpec.of(tensor).nbytes for start, tensor in zip(starts, tensors, strict=True)]
    return min(starts), max(ends)


def holder(tensors: Iterable[torch.Tensor], span: Range) -> torch.Tensor | None:
    """The first tensor in whose storage a range lies as a whole."""
    for tensor in tensors:
        start, end = memory_range(tensor)
        if start <= span[0] and span[1] <= end:
            return tensor
    return None


class Ranges:
    """The memory of several tensors.

    Attributes:
        pairs: Sorted ranges that do not overlap.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.pairs: list[Range] = []
        self.add(tensors)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add the memory of more tensors."""
        merged: list[Range] = []
        for start, end in sorted([*self.pairs, *map(memory_range, tensors)]):
            if start == end:
                continue
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        self.pairs = merged

    def meet(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares this memory."""
        if not self.pairs:
            return False
        start, end = memory_range(tensor)
        before = bisect.bisect_left(self.pairs, (end, 0)) - 1  # the last one that begins before the tensor's end
        return before >= 0 and self.pairs[before][1] > start
