"""Packed sequences in a traced function: torch's functions become operations that a trace can record.

`pack_padded_sequence` and its inverse, of which torch reads lengths on the host while it computes. The number of steps
is asked for only where an operation other than these takes them (`pygraph.tracing.decisions`): sequences that are
packed, go through a layer, and are unpacked have as many traces as they have longest lengths.
"""

# torch's functions have no types. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode

import pygraph.ir.packed_sequences  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the operations

_torch: Any = torch
_PACK, _PAD, _AT = _torch._pack_padded_sequence, _torch._pad_packed_sequence, torch.Tensor.__getitem__


class PackedSequencesMode(TorchFunctionMode):
    """Has sequences packed and unpacked by operations of our own."""

    def __init__(self) -> None:
        super().__init__()
        self._batches: dict[int, tuple[torch.Tensor, int]] = {}  # how many sequences there are, by id of `batch_sizes`

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _AT and type(args[1]) is int and args[1] == 0 and id(args[0]) in self._batches:
            return torch.tensor(self._batches[id(args[0])][1], device="cpu")  # all sequences have a first step
        if func == _PACK and not kwargs and _is_packable(*args):
            padded, lengths, batch_first = args
            rows, batch_sizes = _Packed.apply(padded, lengths, batch_first)  # pyright: ignore[reportGeneralTypeIssues]
            self._batches[id(batch_sizes)] = batch_sizes, padded.shape[0 if batch_first else 1]
            return rows, batch_sizes
        if func == _PAD and not kwargs and isinstance(args[1], torch.Tensor) and args[1].is_cpu:
            return self._padded(*args)
        return func(*args, **(kwargs or {}))

    def _padded(
        self, rows: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, known = self._batches.get(id(batch_sizes), (None, None))
        batch = int(batch_sizes[0]) if known is None else known
        padded: Any = _Padded.apply(rows, batch_sizes, batch_first, value, batch, int(steps))
        return padded, torch.ops.pygraph.lengths(batch_sizes, batch)


def _is_packable(padded: Any, lengths: Any, batch_first: bool) -> bool:
    tensors = isinstance(padded, torch.Tensor) and isinstance(lengths, torch.Tensor)
    if not tensors or maybe_current_level() is not None or padded.dim() < 2 or 0 in padded.shape[:2]:
        return False  # torch says what is wrong
    return lengths.is_cpu and tuple(lengths.shape) == (padded.shape[0 if batch_first else 1],)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        rows, batch_sizes = torch.ops.pygraph.packed(padded, lengths, batch_first)
        ctx.save_for_backward(batch_sizes)
        ctx.mark_non_differentiable(batch_sizes)
        steps, batch = padded.shape[:2][::-1] if batch_first else padded.shape[:2]
        ctx.shape = batch_first, 0.0, batch, steps
        return rows, batch_sizes

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Padded.apply(gradients[0], *ctx.saved_tensors, *ctx.shape), None, None


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, *shape: Any) -> Any:
        ctx.save_for_backward(batch_sizes)
        ctx.options = batch_first, rows.shape[0], shape
        return torch.ops.pygraph.unpacked(rows, batch_sizes, batch_first, *shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Rows.apply(gradients[0], *ctx.saved_tensors, *ctx.options), None, None, None, None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, padded: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, rows: int, shape: Any
    ) -> Any:
        ctx.save_for_backward(batch_sizes)
        ctx.options = batch_first, 0.0, *shape[1:]
        return torch.ops.pygraph.packed_rows(padded, batch_sizes, batch_first, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Padded.apply(gradients[0], *ctx.saved_tensors, *ctx.options), None, None, None, None


def packed_layer(
    batch_sizes: torch.Tensor, options: Sequence[Any], states: int, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """A recurrent layer on packed sequences that cuDNN does not run: its output and last states.

    Args:
        batch_sizes: How many sequences have each step.
        options: The name of torch's function, whether there are biases, the layers, and whether it trains, both ways.
        states: How many states there are.
        tensors: The steps, the states, and the weights.
    """
    found: Any = _PackedLayer.apply(batch_sizes, options, states, *tensors)  # pyright: ignore[reportGeneralTypeIssues]
    return found


class _PackedLayer(torch.autograd.Function):
    """Its backward computes the layer once more: what torch keeps for it is no tensor."""

    @staticmethod
    def forward(ctx: Any, batch_sizes: torch.Tensor, options: Sequence[Any], count: int, *tensors: torch.Tensor) -> Any:
        rows, states, weights = tensors[0], tensors[1 : 1 + count], tensors[1 + count :]
        ctx.save_for_backward(batch_sizes, *tensors)
        ctx.options, ctx.count = options, count
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.pygraph.packed_layer(rows, batch_sizes, list(states), list(weights), *options))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        batch_sizes, rows, *others = ctx.saved_tensors
        given = [one is not None for one in gradients]
        found = torch.ops.pygraph.packed_layer_backward(
            [one for one in gradients if one is not None], given, rows, batch_sizes, others[: ctx.count],
            others[ctx.count :], *ctx.options,
        )  # fmt: skip
        return None, None, None, *found
