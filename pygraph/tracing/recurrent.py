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

from pygraph.errors import TraceError
from pygraph.ir.recurrent import MODES
from pygraph.tracing.packed_sequences import packed_layer

_uses_one_buffer: Any = torch._use_cudnn_rnn_flatten_weight  # pyright: ignore[reportPrivateImportUsage]


class RecurrentLayersMode(TorchFunctionMode):
    """Has recurrent layers recorded that cuDNN would run, or that take packed sequences, where they draw nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in MODES and func == getattr(torch, name) and not kwargs and len(args) == 9:
            found = _layer(name, args)
            if found is not None:
                return found
            if isinstance(args[3], (list, tuple)):  # torch would read how many steps there are where no memory is
                raise TraceError(
                    "it has packed sequences in a layer with dropout, autocast, or transforms of torch.func"
                )
        return func(*args, **kwargs)


def _layer(name: str, args: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
    """The results of a layer; None if torch's own function is to find them."""
    x, second, third, fourth, layers, dropout, train, bidirectional, batch_first = args
    batch_sizes: torch.Tensor | None = None
    if isinstance(second, torch.Tensor) and isinstance(fourth, (list, tuple)):
        batch_sizes, hx, weights, has_biases = second, third, fourth, layers
        layers, dropout, train, bidirectional, batch_first = *args[5:], False
    else:
        hx, weights, has_biases = second, third, fourth
    if not isinstance(weights, (list, tuple)) or not isinstance(dropout, (float, int)):
        return None
    states = tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)
    tensors = [x, *states, *weights]
    draws = train and dropout > 0 and layers > 1
    if draws or maybe_current_level() is not None or not all(isinstance(one, torch.Tensor) for one in tensors):
        return None
    needs_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    if torch.is_autocast_enabled(x.device.type):
        tensors = [_cast(one) for one in tensors]
        x, states, weights = tensors[0], tensors[1 : 1 + len(states)], tensors[1 + len(states) :]
    if not _is_for_cudnn(tensors, is_packed=batch_sizes is not None):
        options = (name, has_biases, layers, train, bidirectional)
        return None if batch_sizes is None else _packed_layer(batch_sizes, options, states, tensors)
    is_shaped = x.dim() == (3 if batch_sizes is None else 2) and all(state.is_contiguous() for state in states)
    if not is_shaped or (needs_gradient and not train):
        return None  # cuDNN has no backward of an evaluation: eager's own error
    numbers = (MODES[name], layers, batch_first, train, bidirectional)
    if not needs_gradient:
        output, hy, cy, *_ = torch.ops.pygraph.recurrent(
            x, list(weights), states[0], _second(states), *numbers, batch_sizes
        )
    else:
        output, hy, cy = _Recurrent.apply(numbers, len(states), batch_sizes, x, *states, *weights)  # pyright: ignore
    return (output, hy, cy) if len(states) == 2 else (output, hy)


def _packed_layer(
    batch_sizes: torch.Tensor, options: Sequence[Any], states: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...] | None:
    """The results of a layer on packed sequences that cuDNN does not run; None if they are not recorded."""
    is_shaped = tensors[0].dim() == 2 and all(state.dim() == 3 for state in states) and batch_sizes.is_cpu
    if not is_shaped or torch.is_autocast_enabled(tensors[0].device.type):
        return None
    return packed_layer(batch_sizes, options, len(states), tensors)


def _second(states: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return states[1] if len(states) == 2 else None


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as autocast passes it to cuDNN: as `float16`, whatever type autocast has (torch 2.11 and 2.13)."""
    return tensor.to(torch.float16) if tensor.is_cuda and tensor.dtype in _FLOATS else tensor


def _is_for_cudnn(tensors: Sequence[torch.Tensor], *, is_packed: bool) -> bool:
    """Whether torch gives a layer on these tensors to cuDNN."""
    first = tensors[0]
    if any(one.device != first.device or one.dtype != first.dtype for one in tensors):
        return False
    if not all(one.numel() for one in tensors[is_packed:]):  # packed sequences have steps, nobody asks how many
        return False
    if not first.is_cuda or first.dtype not in (*_FLOATS, torch.float64):
        return False
    with torch._C.DisableTorchFunction():
        # Not `is_acceptable`, which does not know bfloat16.
        return torch._C._get_cudnn_enabled() and torch.backends.cudnn.is_available() and bool(_uses_one_buffer())


class _Recurrent(torch.autograd.Function):
    """A layer with the backward that cuDNN has for it, which has no derivative of its own."""

    @staticmethod
    def forward(
        ctx: Any, numbers: tuple[Any, ...], count: int, batch_sizes: torch.Tensor | None, x: torch.Tensor,
        *rest: torch.Tensor,
    ) -> Any:  # fmt: skip
        states, weights = rest[:count], rest[count:]
        output, hy, cy, reserve, buffer = torch.ops.pygraph.recurrent(
            x, list(weights), states[0], _second(states), *numbers, batch_sizes
        )
        ctx.save_for_backward(batch_sizes, x, output, reserve, buffer, *rest)
        ctx.numbers, ctx.count = numbers, count
        if count == 1:
            ctx.mark_non_differentiable(cy)
        ctx.set_materialize_grads(False)
        return output, hy, cy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        count, (mode, layers, batch_first, _, bidirectional) = ctx.count, ctx.numbers
        batch_sizes, *rest = ctx.saved_tensors
        saved, weights = rest[: 4 + count], rest[4 + count :]
        present = [one for one in gradients[: 1 + count] if one is not None]
        given = [one is not None for one in (*gradients[: 1 + count], *[None] * (2 - count))]
        found = torch.ops.pygraph.recurrent_backward(
            saved, weights, present, given, mode, layers, batch_first, bidirectional, batch_sizes
        )
        return None, None, None, *found
