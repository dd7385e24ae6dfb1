"""Recurrent layers in a traced function: cuDNN's LSTM, GRU and RNN become operations of a Program.

Torch's own functions look at the addresses of weights before there is an operation to record, which fakes do not have.
"""

# torch's functions have no types, and its stack of transforms is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode

from pygraph.ir.recurrent import MODES

_uses_one_buffer: Any = torch._use_cudnn_rnn_flatten_weight  # pyright: ignore[reportPrivateImportUsage]


class RecurrentLayersMode(TorchFunctionMode):
    """Has recurrent layers that cuDNN would run recorded, where they draw nothing and sequences are not packed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in MODES and func == getattr(torch, name) and not kwargs and len(args) == 9:
            found = _layer(MODES[name], args)
            if found is not None:
                return found
        return func(*args, **kwargs)


def _layer(mode: int, args: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
    """The results of a layer; None if torch's own function is to find them."""
    x, hx, weights, _, layers, dropout, train, bidirectional, batch_first = args
    if not isinstance(weights, (list, tuple)) or not isinstance(dropout, (float, int)):  # of a packed sequence
        return None
    states = tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)
    tensors = [x, *states, *weights]
    draws = train and dropout > 0 and layers > 1
    if draws or maybe_current_level() is not None or not all(isinstance(one, torch.Tensor) for one in tensors):
        return None
    if not torch.is_grad_enabled() or not any(one.requires_grad for one in tensors):
        needs_gradient = False
    elif not train:
        return None  # cuDNN has no backward of an evaluation: eager's own error
    else:
        needs_gradient = True
    if torch.is_autocast_enabled(x.device.type):
        tensors = [_cast(one) for one in tensors]
        x, states, weights = tensors[0], tensors[1 : 1 + len(states)], tensors[1 + len(states) :]
    if not _is_for_cudnn(tensors) or x.dim() != 3 or not all(state.is_contiguous() for state in states):
        return None
    numbers = (mode, layers, batch_first, train, bidirectional)
    if not needs_gradient:
        output, hy, cy, *_ = torch.ops.pygraph.recurrent(x, list(weights), states[0], _second(states), *numbers)
    else:
        output, hy, cy = _Recurrent.apply(numbers, len(states), x, *states, *weights)  # pyright: ignore
    return (output, hy, cy) if len(states) == 2 else (output, hy)


def _second(states: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return states[1] if len(states) == 2 else None


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as autocast passes it to cuDNN: as `float16`, whatever type autocast has (torch 2.11 and 2.13)."""
    return tensor.to(torch.float16) if tensor.is_cuda and tensor.dtype in _FLOATS else tensor


def _is_for_cudnn(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch gives a layer on these tensors to cuDNN."""
    first = tensors[0]
    if any(one.device != first.device or one.dtype != first.dtype or not one.numel() for one in tensors):
        return False
    if not first.is_cuda or first.dtype not in (*_FLOATS, torch.float64):
        return False
    with torch._C.DisableTorchFunction():
        # Not `is_acceptable`, which does not know bfloat16.
        return torch._C._get_cudnn_enabled() and torch.backends.cudnn.is_available() and bool(_uses_one_buffer())


class _Recurrent(torch.autograd.Function):
    """A layer with the backward that cuDNN has for it, which has no derivative of its own."""

    @staticmethod
    def forward(ctx: Any, numbers: tuple[Any, ...], count: int, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        states, weights = rest[:count], rest[count:]
        output, hy, cy, reserve, buffer = torch.ops.pygraph.recurrent(
            x, list(weights), states[0], _second(states), *numbers
        )
        ctx.save_for_backward(x, output, reserve, buffer, *rest)
        ctx.numbers, ctx.count = numbers, count
        if count == 1:
            ctx.mark_non_differentiable(cy)
        ctx.set_materialize_grads(False)
        return output, hy, cy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        count, (mode, layers, batch_first, _, bidirectional) = ctx.count, ctx.numbers
        saved, weights = ctx.saved_tensors[: 4 + count], ctx.saved_tensors[4 + count :]
        present = [one for one in gradients[: 1 + count] if one is not None]
        given = [one is not None for one in (*gradients[: 1 + count], *[None] * (2 - count))]
        found = torch.ops.pygraph.recurrent_backward(
            saved, weights, present, given, mode, layers, batch_first, bidirectional
        )
        return None, None, *found
