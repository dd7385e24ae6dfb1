"""Tensors that only a derivative of a gradient needs."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Kind: TypeAlias = "tuple[torch.Size, torch.dtype, torch.device]"


class Unread:
    """A tensor that a call was passed and its backward does not read.

    The caller may update it, also with results of the call: then it would keep itself alive, through a history that
    Python's garbage collector cannot follow. So what is kept of it is another tensor with the same memory and history.

    Args:
        tensor: The tensor.
        watched: Whether it must not be updated until a derivative of the gradient is taken.
    """

    def __init__(self, tensor: torch.Tensor, *, watched: bool) -> None:
        self._tensor: torch.Tensor | None = tensor
        if tensor.grad_fn is not None:
            with torch.enable_grad():
                self._tensor = _Twin.apply(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        elif not tensor.requires_grad:
            self._tensor = tensor.detach()
        self._version = tensor._version if watched and not tensor.is_inference() else None
        self._kind: Kind | None = None

    def release(self) -> None:
        """Let it go; backwards that do not read it either get one of its kind."""
        if self._tensor is not None:
            self._kind, self._tensor = kind_of(self._tensor), None

    def check(self) -> None:
        """Complain if it has been let go."""
        if self._tensor is None:
            raise RuntimeError(GONE)

    def restore(self) -> torch.Tensor:
        """The tensor, for a backward.

        Raises:
            RuntimeError: The backward may be differentiated, and the tensor has been updated.
        """
        if self._tensor is None:
            assert self._kind is not None
            return without_memory(*self._kind)
        if torch.is_grad_enabled() and self._version is not None and self._tensor._version != self._version:
            raise RuntimeError(
                "an argument of a transformed function was modified by an inplace operation, and is needed for the"
                " gradient of the gradient"
            )
        return self._tensor


GONE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been"
    " freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify"
    " retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors"
    " after calling backward."
)  # in the words of torch


def kind_of(tensor: torch.Tensor) -> Kind:
    """What `without_memory` takes."""
    return tensor.shape, tensor.dtype, tensor.device


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
