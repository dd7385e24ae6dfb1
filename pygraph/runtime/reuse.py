"""Results in the same memory at every call (``reuse_outputs``), and copies of arguments that lie in it.

A graph that reuses its outputs writes them where it was recorded, so nothing is allocated and no output's pointer
changes. The next call of the function overwrites them; if one of its arguments is such a result, the graph would read
what it is writing. Those arguments are copied first, and a call that shows or updates one runs without its graphs.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch

from pygraph.ir.descriptors import Fallback
from pygraph.ir.ranges import Ranges
from pygraph.runtime.alignment import aligned_copy

_COPIED = Fallback("an argument is copied", "it is a result of this function, in memory that the call overwrites")
_LAUNCHED = Fallback(
    "the call", "an argument that it updates or returns is a result of this function, in reused memory"
)


class ReusedMemory:
    """The memory of the results of all graphs of one function.

    Attributes:
        notes: How often an argument lay in it.
    """

    def __init__(self) -> None:
        self.notes: collections.Counter[Fallback] = collections.Counter()
        self._memory = Ranges()

    def add(self, outputs: Sequence[torch.Tensor]) -> None:
        """Add the results of one more graph. A released graph's stay: the caller may hold them still."""
        self._memory.add(outputs)

    def moved_out(self, leaves: Sequence[Any], shown: bool) -> Sequence[Any] | None:
        """The leaves of a call with copies of those that lie in this memory.

        Args:
            leaves: The leaves of ``(args, kwargs)``.
            shown: Whether the call writes to arguments or returns them, for which a copy is no substitute.

        Returns:
            The leaves; None if the graphs cannot be used for them.
        """
        meet = self._memory.meet
        inside = {index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and meet(leaf)}
        if not inside:
            return leaves
        self.notes[_LAUNCHED if shown else _COPIED] += 1
        if shown:
            return None
        return [aligned_copy(leaf) if index in inside else leaf for index, leaf in enumerate(leaves)]
