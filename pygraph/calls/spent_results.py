"""Results whose graph of autograd the call itself has used up: they require grad, and a backward of them raises."""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def mark_spent(leaves: list[Any], spent: Sequence[int]) -> None:
    """Have results require grad as in eager, where a gradient of them is an error."""
    marked: dict[int, torch.Tensor] = {}
    with torch.enable_grad():
        for index in spent:
            leaf = leaves[index]
            if id(leaf) not in marked:
                marked[id(leaf)] = _Spent.apply(_ANCHOR, leaf)  # pyright: ignore
            leaves[index] = marked[id(leaf)]


# What has no gradient, as its graph ends in an error, but makes results require one.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


class _Spent(torch.autograd.Function):
    """The graph of a result of which the call itself has taken the backward."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        """The value, which requires grad."""
        del ctx, anchor
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """An error, as eager's."""
        raise RuntimeError(
            "Trying to backward through the graph a second time: the call that returned this tensor has taken its"
            " backward. Specify retain_graph=True there if you need to backward through the graph again."
        )
