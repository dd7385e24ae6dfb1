"""The state that calls depend on besides arguments and torch's settings, as one description that C++ compares."""

# Containers hold values of any type.
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false
from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torch.autograd import forward_ad  # its _current_level: checked with torch 2.11 and 2.13

from pygraph.guards.environment import Environment
from pygraph.guards.native_description import NO_GUARDS, describe_guards


@dataclasses.dataclass(frozen=True, eq=False)
class Requirements:
    """State that calls of one kind depend on.

    Attributes:
        environment: Python's state that the function reaches, without the items and variables below; None if there is
            none.
        tensors: Tensors that it reaches, whose layouts and gradients are compared, each with the address at which it is
            read; None where it may lie anywhere.
        owned: The ranges of addresses in which no argument may lie.
        items: Containers, keys, and the tensors that were found there.
        cells: Closed-over variables, and the tensors that they were.
    """

    environment: Environment | None
    tensors: tuple[tuple[torch.Tensor, int | None], ...] = ()
    owned: tuple[tuple[int, int], ...] = ()
    items: tuple[tuple[Any, Any, torch.Tensor], ...] = ()
    cells: tuple[tuple[types.CellType, torch.Tensor], ...] = ()

    def has_same_tensors(self, other: Requirements) -> bool:
        """Whether others are of the same tensors."""
        both = zip(self.tensors, other.tensors, strict=False)
        return len(self.tensors) == len(other.tensors) and all(mine is theirs for (mine, _), (theirs, _) in both)

    def is_plain(self) -> bool:
        """Whether all tensors have strides, by which C++ compares them."""
        return all(tensor.layout == torch.strided and not tensor.is_nested for tensor, _ in self.tensors)

    def description(self) -> dict[str, Any]:
        """The part of a plan's description that `native/plan_type.h` reads of it."""
        return {"captured": self.tensors, "owned": self.owned, "environment": self._guards()}

    def _guards(self) -> tuple[Any, ...]:
        if self.environment is None:
            return NO_GUARDS
        # In Python, a call with tangents does not come as far as an environment.
        variables: Any = vars(forward_ad)
        return describe_guards(self.environment.guards, [(variables, "_current_level", -1)], self.items, self.cells)
