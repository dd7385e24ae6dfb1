"""Levels around a call: torch.func's stack of transforms, autograd and forward-mode differentiation."""

# They have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._C import _functorch as functorch  # pyright: ignore
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad  # its _current_level

from pygraph.calls.surroundings import is_dual_level


class Level(enum.Enum):
    """One transform of torch.func's stack."""

    VMAP = enum.auto()
    GRAD = enum.auto()
    JVP = enum.auto()
    OTHER = enum.auto()


_LEVELS = {
    functorch.TransformType.Vmap: Level.VMAP,
    functorch.TransformType.Grad: Level.GRAD,
    functorch.TransformType.Jvp: Level.JVP,
}


def levels() -> list[Level]:
    """Return the transforms that are active, the outermost first."""
    if functorch.peek_interpreter_stack() is None:
        return []
    stack: Any = functorch.get_interpreter_stack()
    return [_LEVELS.get(interpreter.key(), Level.OTHER) for interpreter in stack or ()]


def wrappers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Iterate over a tensor's wrappers, the innermost transform's first, and the plain tensor."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        yield tensor
        tensor = functorch.get_unwrapped(tensor)
    yield tensor


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that transforms have wrapped, below all levels."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has a tangent of forward-mode differentiation."""
    if not is_dual_level() or tensor.is_inference():  # of which torch cannot be asked, and which has none
        return False
    with temporarily_clear_interpreter_stack():
        return forward_ad.unpack_dual(tensor).tangent is not None


def is_active(tensor: torch.Tensor) -> bool:
    """Whether a tensor is batched or differentiated now, by a transform or by autograd.

    A tensor on ``meta`` is not: it has no elements, as the parameters of the module of an ensemble.
    """
    if tensor.is_meta:
        return False
    if functorch.is_functorch_wrapped_tensor(tensor):
        return True
    return (tensor.requires_grad and torch.is_grad_enabled()) or has_tangent(tensor)


def is_tracked(tensor: torch.Tensor) -> bool:
    """Whether any level differentiates a tensor."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    *views, plain = wrappers(tensor)
    return any(map(functorch.is_gradtrackingtensor, views)) or plain.requires_grad or has_tangent(plain)


def is_batched(tensor: torch.Tensor, level: int) -> bool:
    """Whether the transform of this level batches a tensor."""
    return any(
        functorch.is_batchedtensor(view) and functorch.maybe_get_level(view) == level for view in wrappers(tensor)
    )


def batching_levels() -> list[int]:
    """Return the levels of all active ``vmap``."""
    stack: Any = functorch.get_interpreter_stack()
    return [one.level() for one in stack or () if one.key() == functorch.TransformType.Vmap]


def ambient(tensors: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Return whether autograd, and whether forward mode, differentiates any of the tensors below all transforms."""
    inside = bool(levels())
    plain = list(map(plain_of, tensors)) if any(map(functorch.is_functorch_wrapped_tensor, tensors)) else tensors
    backwards = (inside or torch.is_grad_enabled()) and any(map(requires_grad, plain))
    return backwards, is_dual_level() and any(map(has_tangent, plain))


requires_grad = operator.attrgetter("requires_grad")
_FIRST_BATCH = 1
_remove_batch_dim: Any = torch._remove_batch_dim  # pyright: ignore[reportPrivateImportUsage]
_add_batch_dim: Any = torch._add_batch_dim  # pyright: ignore[reportPrivateImportUsage]


class GradientBatch:
    """The batch of cotangents that ``torch.autograd.grad(is_grads_batched=True)`` differentiates at once.

    Autograd has an older kind of ``vmap`` for it, which is not on torch.func's stack. Its level is 1; its level inside
    another such batch cannot be read in the thread that runs a backward.
    """

    @staticmethod
    def among(tensors: Sequence[torch.Tensor]) -> GradientBatch | None:
        """Return the batch that any of the tensors belongs to, if there is one."""
        return GradientBatch() if any(map(functorch.is_legacy_batchedtensor, tensors)) else None

    def split(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int | None, ...], int]:
        """Return plain tensors, the batch dimension of each, and the batch size."""
        batched = [functorch.is_legacy_batchedtensor(tensor) for tensor in tensors]
        pairs = zip(tensors, batched, strict=True)
        plain = [_remove_batch_dim(t, _FIRST_BATCH, 1, 0) if inside else t for t, inside in pairs]
        if any(map(functorch.is_legacy_batchedtensor, plain)):
            raise NotImplementedError("pygraph: a batch of gradients inside another one; torch.func.vmap can do that")
        size = next(tensor.shape[0] for tensor, inside in zip(plain, batched, strict=True) if inside)
        return plain, tuple(0 if inside else None for inside in batched), size

    def join(self, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> list[torch.Tensor]:
        """Return batched tensors, of plain ones with these batch dimensions."""
        pairs = zip(tensors, dims, strict=True)
        return [tensor if dim is None else _add_batch_dim(tensor, dim, _FIRST_BATCH) for tensor, dim in pairs]


def saved_tensors_hooks() -> Any:
    """Return the innermost pair of hooks on tensors that autograd saves, if there is one."""
    autograd: Any = torch._C._autograd  # pyright: ignore  # checked with torch 2.11 and 2.13
    return autograd._top_saved_tensors_default_hooks(True)
