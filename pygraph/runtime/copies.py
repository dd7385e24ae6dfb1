"""Copies of a call's arguments, on which a Program can be tried without changing anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.leaves import overlap_groups
from pygraph.ir.ranges import span_of
from pygraph.runtime.alignment import ALIGNMENT, aligned_copy


def copied_leaves(leaves: Sequence[Any]) -> list[Any]:
    """The leaves with every tensor replaced by a copy of the same alignment; shared memory stays shared."""
    result = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    for group in overlap_groups(leaves):
        members = [leaves[index].detach() for index in group]
        start, end = span_of(members)
        size = -(-(end - start) // 16) * 16
        shift = start % ALIGNMENT  # with which every member is aligned as it was, wherever in the group it lies
        copy = torch.zeros(size + shift, dtype=torch.uint8, device=members[0].device)[shift:]
        for member in members:  # each out of its own storage: another's may end before it, or begin after
            place = member.data_ptr() - start
            memory = _bytes_of(member)
            copy[place : place + memory.numel()].copy_(memory)
        for index, member in zip(group, members, strict=True):
            typed = copy.view(member.dtype)
            first = typed.storage_offset() + (member.data_ptr() - start) // member.element_size()
            result[index] = typed.as_strided(member.shape, member.stride(), first)
    return result


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.data_ptr() - storage.data_ptr()
    return memory.set_(storage, offset, (TensorSpec.of(tensor).nbytes,), (1,))  # pyright: ignore


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # A view without elements must not keep the memory that it is a view of.
    return aligned_copy(tensor) if tensor.numel() else dataclasses.replace(TensorSpec.of(tensor), offset=0).empty()
