"""``pygraph::drawn_after``: a view of a tensor that depends on another tensor, by data.

Inductor orders operations by their data alone. A draw that takes one of its inputs by way of this operation is made
after the draw that the other tensor is a result of. Nothing is computed, launched or copied, and nothing needs it once
Inductor has compiled: `pygraph.ir.random_draws.drop_links`.
"""

from __future__ import annotations

from typing import Any

import torch

from pygraph.ir.ops import define


def _drawn_after(x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    del after
    return x


def _drawn_after_fake(x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    del after
    return torch.ops.aten.alias.default(x)  # another tensor: what records operations tells tensors by their identity


# The layout of the tensor is what attention would ask for without it: exact strides might be those of a part of another
# tensor, with gaps.
define(
    "drawn_after(Tensor(a) x, Tensor after) -> Tensor(a)",
    _drawn_after,
    _drawn_after_fake,
    [torch.Tag.needs_fixed_stride_order],
)

DRAWN_AFTER: Any = torch.ops.pygraph.drawn_after.default
"""The operation."""
