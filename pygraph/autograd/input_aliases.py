"""Results that are input tensors of a function, tensors that it closes over, or views of these.

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

from pygraph.errors import TraceError
from pygraph.ir.dispatch_modes import no_dispatch_modes


@dataclasses.dataclass(frozen=True, eq=False)
class InputAlias:
    """A result that is an input or a view of one.

    Attributes:
        operand: The input's number.
        view: A view of a tensor on ``meta`` that was made in the same way; None if the result is the input itself.
        is_detached: Whether the result is without the input's history.
    """

    operand: int
    view: torch.Tensor | None
    is_detached: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the result for another input."""
        if self.view is None:
            return tensor
        replay: Any = self.view._view_func_unsafe  # pyright: ignore  # checked with torch 2.11 and 2.13
        return replay(tensor.detach() if self.is_detached else tensor)


def find_input_aliases(
    results: Sequence[torch.Tensor], operands: Sequence[Any], closed_over: Mapping[int, int]
) -> dict[int, InputAlias]:
    """Find the results of a run on fake tensors that are its inputs or views of these, by result.

    Args:
        results: The results.
        operands: The fake tensors and other arguments.
        closed_over: The numbers of operands that replace closed-over tensors, by the id of the closed-over tensor: the
            function may return this itself.

    Raises:
        TraceError: A custom function returns its input's memory: what it is as a view says nothing of its gradient.
    """
    numbers = {id(operand): n for n, operand in reversed([*enumerate(operands)]) if isinstance(operand, torch.Tensor)}
    storages = {one.untyped_storage()._cdata for one in operands if isinstance(one, torch.Tensor)}
    found: dict[int, InputAlias] = {}
    for index, result in enumerate(results):
        operand = numbers.get(id(result), closed_over.get(id(result)))
        if operand is not None:
            found[index] = InputAlias(operand, None, False)
        elif _is_view_of(result, numbers) and not _has_symbolic_layout(result):
            base: Any = result._base
            is_detached = base.requires_grad and not result.requires_grad
            found[index] = InputAlias(numbers[id(base)], _on_meta(result, base), is_detached)
        elif result.requires_grad and not _is_view_of(result, numbers) and result.untyped_storage()._cdata in storages:
            raise TraceError("a torch.autograd.Function returns memory of its input, with a gradient of its own")
    return found


def _is_view_of(result: torch.Tensor, numbers: Mapping[int, int]) -> bool:
    """Whether autograd knows a result as a view of one of some tensors, given their numbers by their ids."""
    return result._is_view() and id(result._base) in numbers


def _on_meta(view: Any, base: torch.Tensor) -> torch.Tensor:
    """Return an equal view of a tensor on ``meta``, so that no fake tensor outlives its trace."""
    with no_dispatch_modes(), _force_original_view_tracking(True), torch.no_grad():
        on_meta = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
        return view._view_func_unsafe(on_meta)


def _has_symbolic_layout(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)


def without_bases(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results, where those that share memory with no other tensor are no views.

    Autograd refuses in-place updates of views that a custom function returns together with other results.
    """
    if not any(map(torch.Tensor._is_view, results)):
        return list(results)
    counts = collections.Counter(tensor.untyped_storage()._cdata for tensor in (*results, *operands))
    return [r.data if r._is_view() and counts[r.untyped_storage()._cdata] == 1 else r for r in results]
