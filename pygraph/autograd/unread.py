"""Stand-ins for tensors that a call was passed, where its derivatives need no more of them."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]
"""What `without_memory` is told of a tensor."""


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """What is kept of a tensor that a call was passed and its backward does not read.

    The caller may update it, also with results of the call: then it would keep itself alive, through a history that
    Python's garbage collector cannot follow. So what is kept of it is another tensor with the same memory and history.
    """
    if tensor.grad_fn is not None:
        with torch.enable_grad():
            twin: torch.Tensor = _Twin.apply(tensor)  # pyright: ignore[reportAttributeAccessIssue]
            return twin
    return tensor if tensor.requires_grad else tensor.detach()


def without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of this kind with memory for one element."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


class _Twin(torch.autograd.Function):
    """A tensor of the same memory and history, which does not refer to the first one as a view would."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient
