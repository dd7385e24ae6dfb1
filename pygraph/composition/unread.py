"""Tensors that only a derivative of a gradient needs."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch


class Unread:
    """A tensor that a call was passed and its backward does not read.

    The caller may update it, also with results of the call: then it would keep itself alive, through a history that
    Python's garbage collector cannot follow. So what is kept of it is another tensor with the same memory and history.

    Args:
        tensor: The tensor.
        watched: Whether it must not be updated until a derivative of the gradient is taken.
    """

    def __init__(self, tensor: torch.Tensor, *, watched: bool) -> None:
        self._tensor: torch.Tensor = tensor
        if tensor.grad_fn is not None:
            with torch.enable_grad():
                self._tensor = _Twin.apply(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        elif not tensor.requires_grad:
            self._tensor = tensor.detach()
        self._version = tensor._version if watched and not tensor.is_inference() else None
        self.is_there = True

    def release(self) -> None:
        """Let it go; a tensor without its memory stays, for backwards that do not read it either."""
        self.is_there = False
        self._tensor, self._version = without_memory(self._tensor), None

    def restore(self) -> torch.Tensor:
        """The tensor, for a backward.

        Raises:
            RuntimeError: The backward may be differentiated, and the tensor has been updated.
        """
        if torch.is_grad_enabled() and self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(
                "an argument of a transformed function was modified by an inplace operation, and is needed for the"
                " gradient of the gradient"
            )
        return self._tensor


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind with memory for one element."""
    return tensor.detach().new_empty(()).expand(tensor.shape)


class _Twin(torch.autograd.Function):
    """A tensor of the same memory and history, which does not refer to the first one as a view would."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient
