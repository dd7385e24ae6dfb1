"""Results that are tensors which a function was passed or closes over, or views of these.

They are made outside of the operation that a call is, so that their identity and history are eager's.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.grad_mode import _force_original_view_tracking  # checked with torch 2.13
from torch.utils._python_dispatch import _disable_current_modes  # checked with torch 2.11 and 2.13


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """What a result is of an operand.

    Attributes:
        operand: The operand's number.
        view: The same view of a tensor without memory; None if the result is the operand itself.
        is_detached: Whether it is without the operand's history.
    """

    operand: int
    view: torch.Tensor | None
    is_detached: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same of another tensor."""
        if self.view is None:
            return tensor
        replay: Any = self.view._view_func_unsafe  # pyright: ignore  # checked with torch 2.11 and 2.13
        return replay(tensor.detach() if self.is_detached else tensor)


def shared_results(
    results: Sequence[torch.Tensor], operands: Sequence[Any], themselves: Mapping[int, int]
) -> dict[int, Shared]:
    """What results of a run on fakes are of its operands, by result.

    Args:
        results: The results.
        operands: The fakes, and what else was passed.
        themselves: Operands that the function may return without having been passed them, by id.
    """
    numbers = {id(operand): n for n, operand in reversed([*enumerate(operands)]) if isinstance(operand, torch.Tensor)}
    found: dict[int, Shared] = {}
    for index, result in enumerate(results):
        operand = numbers.get(id(result), themselves.get(id(result)))
        if operand is not None:
            found[index] = Shared(operand, None, False)
        elif result._is_view() and id(result._base) in numbers and not _has_live_numbers(result):
            base: Any = result._base
            is_detached = base.requires_grad and not result.requires_grad
            found[index] = Shared(numbers[id(base)], _without_memory(result, base), is_detached)
    return found


def _without_memory(view: Any, base: torch.Tensor) -> torch.Tensor:
    """The same view of a tensor on meta, as nothing of a trace may outlive it; it keeps how it was made."""
    with _disable_current_modes(), _force_original_view_tracking(True), torch.no_grad():
        place = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
        return view._view_func_unsafe(place)


def without_bases(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results, of which those that have their memory to themselves are views of nothing.

    Of a function that returns several tensors, autograd refuses updates of those that are views.
    """
    if not any(map(torch.Tensor._is_view, results)):
        return list(results)
    counts = collections.Counter(tensor.untyped_storage()._cdata for tensor in (*results, *operands))
    return [r.data if r._is_view() and counts[r.untyped_storage()._cdata] == 1 else r for r in results]


def _has_live_numbers(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)
