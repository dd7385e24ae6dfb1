"""The tensors that a graph is recorded with, one for each input of a call: only their addresses matter.

Replays get other addresses, and the values here, poison, show pointers that have not changed. So large tensors of one
dtype lie in the same memory, each some bytes behind the one before. Which pointer is whose, another recording says,
with the inputs themselves. Where these share memory too, each is another distance away from where it is there.
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
        tangled: Those of them that share memory with other inputs of the call as well.
    """

    tensors: list[torch.Tensor | None]
    together: frozenset[int]
    tangled: frozenset[int]


def recorded_inputs(body: RegionBody, inputs: Sequence[torch.Tensor], separate: Collection[int]) -> RecordedInputs:
    """Make the tensors that a region is recorded with; those in memory of their own have the values of the inputs.

    Args:
        body: The region.
        inputs: Its inputs.
        separate: Positions of those that have memory of their own in any case.
    """
    groups = overlap_groups(inputs)
    written = frozenset(body.written)
    excluded = {*separate, *(index for group in groups if not written.isdisjoint(group) for index in group)}
    kinds: dict[tuple[torch.dtype, Reach], list[int]] = {}
    for position, (node, tensor) in enumerate(zip(body.inputs, inputs, strict=True)):
        reach = body.reach.get(node, Reach.NOT)
        # The emulated device runs what it records, and no index may become another then.
        may_share = reach is Reach.NOT or (reach is not Reach.COMPUTED and position not in written)
        if position not in excluded and may_share and is_large(TensorSpec.of(tensor)):
            kinds.setdefault((tensor.dtype, reach), []).append(position)
    shared = [positions for positions in kinds.values() if len(positions) > 1]
    together = frozenset(position for positions in shared for position in positions)
    tensors = [
        aligned_copy(tensor) if tensor.numel() and position not in together else None
        for position, tensor in enumerate(inputs)
    ]
    for positions in shared:
        specs = [TensorSpec.of(inputs[position]) for position in positions]
        addresses = [inputs[position].data_ptr() for position in positions]
        for position, tensor in zip(positions, in_one_memory(specs, addresses), strict=True):
            tensors[position] = tensor
    return RecordedInputs(tensors, together, together & {index for group in groups for index in group})


def in_one_memory(specs: Sequence[TensorSpec], addresses: Sequence[int]) -> list[torch.Tensor]:
    """Tensors of one dtype in one memory, each beginning behind where the one before begins.

    Each has a storage of its own: operations refuse to write to a tensor that lies in the storage of one they read.

    Args:
        specs: Their specs.
        addresses: Others like them: they are aligned alike, and no two are as far from them.
    """
    size, dtype, device = specs[0].dtype.itemsize, specs[0].dtype, specs[0].device
    starts: list[int] = []
    distances: set[int] = set()
    number = 0
    for address in addresses:
        offset = alignment_of(address) % ALIGNMENT
        while address - (start := number * ALIGNMENT * 2 + offset) in distances:
            number += 1
        distances.add(address - start)
        starts.append(start // size)
        number += 1
    count = max(start + spec.span for start, spec in zip(starts, specs, strict=True))
    # Zero is in range wherever an index is: the emulated device runs what it records.
    memory = torch.zeros(count, dtype=dtype, device=device)
    return [_over(memory, start * size, spec) for spec, start in zip(specs, starts, strict=True)]


def _over(memory: torch.Tensor, start: int, spec: TensorSpec) -> torch.Tensor:
    """A tensor whose storage is some memory from byte ``start`` on, and no larger than the tensor."""
    storage: torch.UntypedStorage = memory.untyped_storage()[start : start + spec.nbytes]  # pyright: ignore
    return torch.empty(0, dtype=spec.dtype, device=spec.device).set_(storage, 0, spec.shape, spec.stride)  # pyright: ignore
