"""``pygraph::dropout_mask``: the mask of a dropout with eager's random numbers, without the dropout.

Eager's kernel of a dropout reads its input, and writes the result and the mask. Where a fused kernel makes the result,
only the mask is needed, which is a ninth of what eager's moves in single precision. Ordinary calls run eager's kernel
and drop its result. A recorded graph may have a kernel that writes the mask alone; it finds out here where.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch

from pygraph.ir.ops import define

_here = threading.local()


def _dropout_mask(
    size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device, p: float, after: torch.Tensor | None
) -> torch.Tensor:
    note: Callable[[], None] = getattr(_here, "note", _nothing)
    like = torch.empty_strided(size, stride, dtype=dtype, device=device)
    note()
    _, mask = torch.ops.aten.native_dropout.default(like, p, True)
    note()
    return mask


def _dropout_mask_fake(
    size: list[int], stride: list[int], dtype: torch.dtype, device: torch.device, p: float, after: torch.Tensor | None
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=device)


def _nothing() -> None:
    return None


@contextlib.contextmanager
def noted(count: Callable[[], int]) -> Generator[list[tuple[int, int]], None, None]:
    """A block in which masks are noted, in the list that it yields: what `count` says before and after each.

    Args:
        count: Says how many nodes have been recorded.
    """
    counts: list[int] = []
    spans: list[tuple[int, int]] = []

    def note() -> None:
        counts.append(count())
        if len(counts) == 2:
            spans.append((counts[0], counts[1]))
            counts.clear()

    _here.note = note
    try:
        yield spans
    finally:
        del _here.note


define(
    "dropout_mask(int[] size, int[] stride, ScalarType dtype, Device device, float p, Tensor? after) -> Tensor",
    _dropout_mask,
    _dropout_mask_fake,
    [torch.Tag.nondeterministic_seeded, torch.Tag.flexible_layout],  # nothing reads the draw before
)

DROPOUT_MASK: Any = torch.ops.pygraph.dropout_mask.default
"""The operation."""
