"""The memory that a graph is recorded with of outputs that its region only allocates: one piece for several.

Replays write outputs elsewhere; what is in the memory of the recording, poison, shows pointers that have not changed.
So large ones lie in the same memory, each some bytes behind the one before. Which pointer is whose, another recording
says, which has memory for each. See also `pygraph.runtime.recorded_inputs`.
"""

from __future__ import annotations

import torch
from torch import fx

from pygraph.runtime.body import RegionBody
from pygraph.runtime.host_copies import is_large
from pygraph.runtime.recorded_inputs import in_one_memory


def allocations_in_one_memory(body: RegionBody) -> dict[fx.Node, torch.Tensor]:
    """Tensors for those of a region's ``allocations`` that may lie in the same memory: large ones of one dtype."""
    kinds: dict[torch.dtype, list[fx.Node]] = {}
    for node in body.allocations:
        spec = node.meta["spec"]
        # In integers there may be an index, and then there must not be anything else.
        if node not in body.reach and spec.dtype.is_floating_point and is_large(spec):
            kinds.setdefault(spec.dtype, []).append(node)
    found: dict[fx.Node, torch.Tensor] = {}
    for nodes in kinds.values():
        if len(nodes) > 1:
            tensors = in_one_memory([node.meta["spec"] for node in nodes], [0] * len(nodes))
            found.update(zip(nodes, tensors, strict=True))
    return found
