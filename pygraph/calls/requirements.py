"""State that a kind of calls depends on besides arguments and torch's settings, described once for Python and C++."""

# Containers hold values of any type.
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false
from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad  # its _current_level: checked with torch 2.11 and 2.13

from pygraph.guards.environment import Environment
from pygraph.guards.native_description import NO_GUARDS, describe_guards
from pygraph.ir.descriptors import Captured
from pygraph.ir.effects import writes_memory
from pygraph.ir.program import Program
from pygraph.ir.ranges import Ranges
from pygraph.lowering.aten import written_inputs


class CapturedTensor(NamedTuple):
    """A tensor that calls read without being passed it, as it was when they were compiled.

    Attributes:
        tensor: The tensor.
        layout: Its shape, strides, dtype, device and ``requires_grad``.
        offset: Where it begins in its storage.
        address: Where graphs read it; None if it may lie anywhere.
    """

    tensor: torch.Tensor
    layout: tuple[Any, ...]
    offset: int | torch.SymInt
    address: int | None

    @classmethod
    def of(cls, tensor: torch.Tensor, address: int | None = None) -> CapturedTensor:
        """Describe a tensor that has strides."""
        return cls(tensor, _layout(tensor), tensor.storage_offset(), address)

    def has_changed(self) -> bool:
        """Whether it has another layout, or is not where graphs read it."""
        moved = self.address is not None and self.tensor.data_ptr() != self.address
        return moved or _layout(self.tensor) != self.layout


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


@dataclasses.dataclass(frozen=True, eq=False)
class Requirements:
    """The state that a kind of calls depends on.

    Attributes:
        environment: Python's state that the function reaches, without the items and variables below; None if there is
            none.
        tensors: The tensors that calls read without being passed them.
        owned: The memory in which no argument may lie: that of these tensors, if calls write to anything.
        items: Containers, keys, and the tensors that were found there.
        cells: Closed-over variables, and the tensors that they were.
    """

    environment: Environment | None = None
    tensors: tuple[CapturedTensor, ...] = ()
    owned: Ranges = dataclasses.field(default_factory=Ranges)
    items: tuple[tuple[Any, Any, torch.Tensor], ...] = ()
    cells: tuple[tuple[types.CellType, torch.Tensor], ...] = ()

    @classmethod
    def of(
        cls, program: Program, environment: Environment | None, addresses: Sequence[int] | None = None
    ) -> Requirements:
        """The state that calls which run a Program depend on.

        Args:
            program: The Program.
            environment: Python's state that its trace depends on.
            addresses: Where its captured tensors were recorded; None if calls read them where they are.
        """
        found = [descriptor.value for descriptor in program.inputs if isinstance(descriptor, Captured)]
        placed = [None] * len(found) if addresses is None else addresses
        tensors = tuple(map(CapturedTensor.of, found, placed))
        writes = bool(written_inputs(program)) or writes_memory(program.nodes)
        return cls(environment, tensors, Ranges(found if writes else ()))

    # -- Python ---------------------------------------------------------------------------------------------------

    def hold(self) -> bool:
        """Whether all is as it was, so that a call with the right arguments and settings may run."""
        for tensor, _, _, address in self.tensors:
            if address is not None and tensor.data_ptr() != address:
                return False
        return self.hold_anywhere()

    def hold_anywhere(self, *, same_offsets: bool = False) -> bool:
        """Whether all is as it was, wherever tensors lie now.

        Args:
            same_offsets: Whether each must begin where it did in its storage.
        """
        if self.environment is not None and not self.environment.is_current():
            return False
        for tensor, layout, offset, _ in self.tensors:
            if _layout(tensor) != layout or (same_offsets and tensor.storage_offset() != offset):
                return False
        return True

    def owned_memory_meets(self, leaves: Sequence[Any]) -> bool:
        """Whether an argument lies in the memory of a captured tensor, and one of them is written."""
        if not self.owned.pairs:
            return False
        owned = self.owned
        if any(one.address is None for one in self.tensors):  # calls read them where they are now
            owned = Ranges(one.tensor for one in self.tensors)
        return any(isinstance(leaf, torch.Tensor) and owned.meet(leaf) for leaf in leaves)

    def changed(self) -> str | None:
        """The name of the first thing that is another now, as a user would write it; None if it has none."""
        if self.environment is None:
            return None
        others = (self.environment.names.get(id(one.tensor)) for one in self.tensors if one.has_changed())
        return self.environment.changed() or next(others, None)

    def may_hold_again(self) -> bool:
        """Whether all that differs now are plain values, so that it may be as it was again."""
        return self.environment is not None and self.environment.may_return()

    def has_same_tensors(self, other: Requirements) -> bool:
        """Whether others are of the same tensors."""
        both = zip(self.tensors, other.tensors, strict=False)
        return len(self.tensors) == len(other.tensors) and all(mine.tensor is theirs.tensor for mine, theirs in both)

    # -- C++ ------------------------------------------------------------------------------------------------------

    def description(self) -> dict[str, Any]:
        """The part of a plan's description that `native/plan_type.h` reads of it."""
        return {
            "captured": tuple((one.tensor, one.address) for one in self.tensors),
            "owned": tuple(self.owned.pairs),
            "environment": self._guards(),
        }

    def _guards(self) -> tuple[Any, ...]:
        if self.environment is None:
            return NO_GUARDS
        # In Python, a call with tangents does not come as far as an environment.
        variables: Any = vars(forward_ad)
        return describe_guards(self.environment.guards, [(variables, "_current_level", -1)], self.items, self.cells)
