"""``pygraph::sample``: random numbers that depend on no values, and an argument for the draw before, for the order.

Eager's operations take no tensor (``rand``), so that nothing says which draw they come after, or one of which they read
the layout alone (``bernoulli_`` on new memory), which Inductor copies. Here as there, the numbers are drawn by an
operation in place, on new, contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph.ir.ops import define

# ATen's factories do nothing else: `uniform_(0, 1)` for `rand`, `normal_(0, 1)` for `randn`, `random_` for `randint`.
# Checked with torch 2.13.
_DRAWS: dict[str, Callable[..., torch.Tensor]] = {
    "bernoulli": torch.Tensor.bernoulli_,
    "uniform": torch.Tensor.uniform_,
    "normal": torch.Tensor.normal_,
    "randint": torch.Tensor.random_,
}


def _sample(
    draw: str, size: list[int], dtype: torch.dtype, device: torch.device, numbers: list[float],
    after: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    del after
    chosen = map(int, numbers) if draw == "randint" else numbers
    return _DRAWS[draw](torch.empty(size, dtype=dtype, device=device), *chosen)


def _sample_fake(
    draw: str, size: list[int], dtype: torch.dtype, device: torch.device, numbers: list[float],
    after: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    del draw, numbers, after
    return torch.empty(size, dtype=dtype, device=device)


define(
    "sample(str draw, int[] size, ScalarType dtype, Device device, float[] numbers, Tensor? after) -> Tensor",
    _sample,
    _sample_fake,
    [torch.Tag.nondeterministic_seeded, torch.Tag.flexible_layout],  # nothing reads the draw before
)

SAMPLE: Any = torch.ops.pygraph.sample.default
"""The operation."""
