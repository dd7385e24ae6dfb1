"""Tensors that are kept for derivatives, and those that only a derivative of a gradient needs."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch


class Held:
    """A tensor that can be let go.

    Args:
        tensor: The tensor.
        version: The version that it must stay at; None if any will do.
    """

    __slots__ = ("_kind", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, version: int | None) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._version = version

    def release(self) -> None:
        """Let it go."""
        if self._tensor is not None:
            self._kind = self._tensor.shape, self._tensor.dtype, self._tensor.device
            self._tensor = None

    def check(self) -> torch.Tensor:
        """The tensor; complain if it has been let go, in the words of torch."""
        if self._tensor is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have"
                " already been freed). Saved intermediate values of the graph are freed when you call .backward() or"
                " autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time or"
                " if you need to access saved tensors after calling backward."
            )
        return self._tensor

    def restore(self) -> torch.Tensor:
        """The tensor; if it has been let go, one of its kind, for what does not read it."""
        return without_memory(*self._kind) if self._tensor is None else self._tensor


class Unread(Held):
    """A tensor that a call was passed and its backward does not read.

    The caller may update it, also with results of the call: then it would keep itself alive, through a history that
    Python's garbage collector cannot follow. So what is kept of it is another tensor with the same memory and history.

    Args:
        tensor: The tensor.
        watched: Whether it must not be updated until a derivative of the gradient is taken.
    """

    def __init__(self, tensor: torch.Tensor, *, watched: bool) -> None:
        super().__init__(tensor, tensor._version if watched and not tensor.is_inference() else None)
        if tensor.grad_fn is not None:
            with torch.enable_grad():
                self._tensor = _Twin.apply(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        elif not tensor.requires_grad:
            self._tensor = tensor.detach()

    def restore(self) -> torch.Tensor:
        """The tensor, for a backward.

        Raises:
            RuntimeError: The backward may be differentiated, and the tensor has been updated.
        """
        tensor = super().restore()
        if self._tensor is not None and self._is_outdated(tensor):
            raise RuntimeError(
                "an argument of a transformed function was modified by an inplace operation, and is needed for the"
                " gradient of the gradient"
            )
        return tensor

    def _is_outdated(self, tensor: torch.Tensor) -> bool:
        return torch.is_grad_enabled() and self._version is not None and tensor._version != self._version


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
