"""The tensors that a graph is recorded with, one for each input of a call: only their addresses matter.

Replays get other addresses, and the values here, poison, show pointers that have not changed. So large tensors of one
dtype lie in the same memory, each some bytes behind the one before. Which pointer is whose, another recording says,
with the inputs themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.leaves import overlap_groups
from pygraph.runtime.alignment import ALIGNMENT, aligned_copy, alignment_of
from pygraph.runtime.body import RegionBody
from pygraph.runtime.host_copies import is_large
from pygraph.runtime.indices import Reach


@dataclasses.dataclass(frozen=True)
class RecordedInputs:
    """The tensors that a region is recorded with.

    Attributes:
        tensors: Per input, a tensor that is laid out and aligned alike; None for one without memory.
        together: Positions of those that share memory with others. Nothing can be copied to them.
    """

    tensors: list[torch.Tensor | None]
    together: frozenset[int]


def recorded_inputs(body: RegionBody, inputs: Sequence[torch.Tensor], separate: Collection[int]) -> RecordedInputs:
    """Make the tensors that a region is recorded with; those in memory of their own have the values of the inputs.

    Args:
        body: The region.
        inputs: Its inputs.
        separate: Positions of those that have memory of their own in any case.
    """
    excluded = {*separate, *body.written, *(index for group in overlap_groups(inputs) for index in group)}
    kinds: dict[tuple[torch.dtype, Reach], list[int]] = {}
    for position, (node, tensor) in enumerate(zip(body.inputs, inputs, strict=True)):
        reach = body.reach.get(node, Reach.NOT)
        if position not in excluded and reach is not Reach.COMPUTED and is_large(TensorSpec.of(tensor)):
            kinds.setdefault((tensor.dtype, reach), []).append(position)
    shared = [positions for positions in kinds.values() if len(positions) > 1]
    together = frozenset(position for positions in shared for position in positions)
    tensors = [
        aligned_copy(tensor) if tensor.numel() and position not in together else None
        for position, tensor in enumerate(inputs)
    ]
    for positions in shared:
        specs = [TensorSpec.of(inputs[position]) for position in positions]
        offsets = [alignment_of(inputs[position].data_ptr()) % ALIGNMENT for position in positions]
        for position, tensor in zip(positions, in_one_memory(specs, offsets), strict=True):
            tensors[position] = tensor
    return RecordedInputs(tensors, together)


def in_one_memory(specs: Sequence[TensorSpec], offsets: Sequence[int]) -> list[torch.Tensor]:
    """Tensors of one dtype, each beginning behind where the one before begins, some bytes after an aligned address."""
    size, dtype, device = specs[0].dtype.itemsize, specs[0].dtype, specs[0].device
    starts = [number * ALIGNMENT * 2 // size + offset // size for number, offset in enumerate(offsets)]
    count = max(start + spec.span for start, spec in zip(starts, specs, strict=True))
    # Zero is in range wherever an index is: the emulated device runs what it records.
    memory = torch.zeros(count, dtype=dtype, device=device)
    return [memory.as_strided(s.shape, s.stride, start) for s, start in zip(specs, starts, strict=True)]
