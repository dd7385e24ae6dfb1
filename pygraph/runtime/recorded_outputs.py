"""The memory that a graph is recorded with of outputs that its region only allocates: one piece for several.

Replays write outputs elsewhere; what is in the memory of the recording, poison, shows pointers that have not changed.
So large ones lie in the same memory, each some bytes behind the one before. Which pointer is whose, another recording
says, which has memory for each. See also `pygraph.runtime.recorded_inputs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import root
from pygraph.runtime.alignment import ALIGNMENT
from pygraph.runtime.body import RegionBody
from pygraph.runtime.host_copies import is_large
from pygraph.runtime.indices import Reach


def allocations_in_one_memory(body: RegionBody) -> dict[fx.Node, torch.Tensor]:
    """Tensors for those of a region's ``allocations`` that may lie in the same memory: large ones of one dtype."""
    indices = {root(node) for node in body.outputs if body.reach.get(node, Reach.NOT) is not Reach.NOT}
    kinds: dict[torch.dtype, list[fx.Node]] = {}
    for node in body.allocations:
        spec = node.meta["spec"]
        # In integers there may be an index, and then there must not be anything else.
        if node not in indices and node not in body.reach and spec.dtype.is_floating_point and is_large(spec):
            kinds.setdefault(spec.dtype, []).append(node)
    found: dict[fx.Node, torch.Tensor] = {}
    for nodes in kinds.values():
        if len(nodes) > 1:
            found.update(zip(nodes, _in_one_memory([node.meta["spec"] for node in nodes]), strict=True))
    return found


def _in_one_memory(specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Tensors with storages of their own, each beginning behind where the one before begins."""
    starts = range(0, 2 * ALIGNMENT * len(specs), 2 * ALIGNMENT)
    count = max(start + spec.nbytes for start, spec in zip(starts, specs, strict=True))
    # Zeros, as the emulated device runs what it records.
    memory = torch.zeros(count, dtype=torch.uint8, device=specs[0].device).untyped_storage()
    tensors: list[torch.Tensor] = []
    for start, spec in zip(starts, specs, strict=True):
        one = torch.empty(0, dtype=spec.dtype, device=spec.device)
        tensors.append(one.set_(memory[start : start + spec.nbytes], 0, spec.shape, spec.stride))  # pyright: ignore
    return tensors
