"""Placeholders: tensors that replace saved tensors of a call that its derivatives do not read."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Metadata: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]
"""A tensor's shape, dtype and device."""


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of this shape with memory for one element."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def alias_with_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor with the same memory and history, to be saved of an argument that a backward does not read.

    The caller may update the argument, also with results of the call. If the call had saved the argument itself, it
    would keep itself alive then, through a history that Python's garbage collector cannot follow.
    """
    if tensor.grad_fn is not None:
        with torch.enable_grad():
            alias: torch.Tensor = _Alias.apply(tensor)  # pyright: ignore[reportAttributeAccessIssue]
            return alias
    return tensor if tensor.requires_grad else tensor.detach()


class _Alias(torch.autograd.Function):
    """An alias that does not refer to the first tensor, as a view would."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient
