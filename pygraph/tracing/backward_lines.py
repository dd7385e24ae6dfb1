"""The lines of the operations that autograd has recorded in a trace, to which its backwards are attributed."""

# Nodes of autograd and their numbers are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from typing import Any

import torch


class BackwardLines:
    """Finds, for each operation of a backward, the line of the operation that it is the derivative of."""

    def __init__(self) -> None:
        self._lines: dict[int, str | None] = {}
        self._is_unclear = False

    def forward_of(self, source: str | None) -> str | None:
        """The line of the forward, for an operation of a backward that runs now; None for any other operation.

        Args:
            source: The line of the operation, which is remembered if autograd has just recorded it.
        """
        node: Any = torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]
        if node is None:
            # Autograd numbers what it records. Later operations that it does not record find the number taken.
            number: int = torch.autograd._get_sequence_nr() - 1  # pyright: ignore
            self._lines.setdefault(number, source)
            return None
        # A thread of autograd numbers what it records itself anew: derivatives of derivatives.
        self._is_unclear = self._is_unclear or torch.is_grad_enabled()
        return None if self._is_unclear else self._lines.get(node._sequence_nr())
