"""Arguments on which a Program can be tried without changing those of the call: copies, or these, watched."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Sequence
from typing import Any

import torch

from pygraph.errors import CaptureError
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.leaves import overlap_groups
from pygraph.ir.ranges import span_of
from pygraph.runtime.alignment import ALIGNMENT, aligned_copy
from pygraph.runtime.host_copies import HostCopy, bytes_of


class ChangedError(CaptureError):
    """A trial has changed an argument that the Program does not update; the argument is as it was before."""


@contextlib.contextmanager
def trial_leaves(leaves: Sequence[Any], written: Collection[int]) -> Generator[list[Any], None, None]:
    """Leaves of a call for trials, which leave those of the call as they are.

    Large ones that nothing is written to are those of the call: there is no memory for a second one. What is not
    proven yet may write anywhere, so they are compared with copies on the host at the end.

    Args:
        leaves: The leaves of ``(args, kwargs)``.
        written: Positions of the leaves that trials write to.

    Raises:
        ChangedError: A trial has written to another one.
    """
    watched: dict[int, HostCopy] = {}
    for index, leaf in enumerate(leaves):
        if index not in written and isinstance(leaf, torch.Tensor):
            copy = HostCopy.of(leaf.detach())
            if copy is not None:
                watched[index] = copy
    groups = [group for group in overlap_groups(leaves) if not watched.keys() >= {*group}]
    for group in groups:
        for index in group:
            watched.pop(index, None)
    changed: list[int] = []
    try:
        yield _copied(leaves, groups, watched.keys())
    finally:
        changed += [index for index, copy in watched.items() if copy.restore(leaves[index].detach())]
    if changed:
        raise ChangedError(f"a trial has written to arguments that are not updated: leaves {changed}")


def _copied(leaves: Sequence[Any], groups: Sequence[Sequence[int]], watched: Collection[int]) -> list[Any]:
    """The leaves with every other tensor replaced by a copy of the same alignment; shared memory stays shared."""
    result = list(leaves)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            result[index] = leaf.data if index in watched else _copy(leaf)  # with a version of its own
    for group in groups:
        members = [leaves[index].detach() for index in group]
        start, end = span_of(members)
        size = -(-(end - start) // 16) * 16
        shift = start % ALIGNMENT  # with which every member is aligned as it was, wherever in the group it lies
        copy = torch.zeros(size + shift, dtype=torch.uint8, device=members[0].device)[shift:]
        for member in members:  # each out of its own storage: another's may end before it, or begin after
            place = member.data_ptr() - start
            memory = bytes_of(member)
            copy[place : place + memory.numel()].copy_(memory)
        for index, member in zip(group, members, strict=True):
            typed = copy.view(member.dtype)
            first = typed.storage_offset() + (member.data_ptr() - start) // member.element_size()
            result[index] = typed.as_strided(member.shape, member.stride(), first)
    return result


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # A view without elements must not keep the memory that it is a view of.
    return aligned_copy(tensor) if tensor.numel() else dataclasses.replace(TensorSpec.of(tensor), offset=0).empty()
