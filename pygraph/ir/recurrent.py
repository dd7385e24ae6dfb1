"""Operations of cuDNN's recurrent layers: LSTM, GRU and RNN, forward and backward, on weights as they are.

==============================  ===================================================================================
``pygraph::recurrent``          outputs, last states, and what the backward needs: a reserve, and all weights in one
``pygraph::recurrent_backward`` gradients of inputs, first states and weights
==============================  ===================================================================================

Torch's own operations take the weights in one buffer, which they overlap and a trace cannot see; they describe the
reserve as empty, write to it in the backward, and return gradients of weights that are views of one buffer. These here
put the weights into a new buffer at each call, as torch does where they do not lie in one, and return memory of its own
for each result. Without dropout they draw no random numbers. With `batch_sizes`, which are on the host, sequences are
packed (`pygraph.ir.packed_sequences`), and the layer runs between graphs.
"""

# cuDNN's operations are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.ir.ops import define

_cudnn: Any = torch

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers of the layers that torch has functions for."""

RESERVE = 3
"""The position of the reserve among the results of the forward. It has gaps that nothing writes to."""


def _sizes(hx: torch.Tensor, cx: torch.Tensor | None) -> tuple[int, int]:
    """The size of the hidden state, and that of its projection: zero without one."""
    if cx is None or cx.shape[-1] == hx.shape[-1]:
        return hx.shape[-1], 0
    return cx.shape[-1], hx.shape[-1]


def _stride(weights: Sequence[torch.Tensor], layers: int, bidirectional: bool) -> int:
    """How many weights each layer has in each direction."""
    return len(weights) // (layers * (1 + bidirectional))


def _in_one_buffer(
    x: torch.Tensor, weights: Sequence[torch.Tensor], sizes: tuple[int, int], mode: int, layers: int,
    batch_first: bool, bidirectional: bool,
) -> tuple[list[torch.Tensor], torch.Tensor]:  # fmt: skip
    """The weights as views of one new buffer, and that."""
    # cuDNN's function has its arguments refer to the buffer: they must be tensors that nobody else has.
    views = [torch.empty(0, dtype=one.dtype, device=one.device).set_(one.detach()) for one in weights]  # pyright: ignore
    buffer = _cudnn._cudnn_rnn_flatten_weight(
        views, _stride(weights, layers, bidirectional), x.shape[-1], mode, *sizes, layers, batch_first, bidirectional
    )
    return views, buffer


def _numbers(batch_sizes: torch.Tensor | None) -> list[int]:
    """How many sequences have each step, if they are packed."""
    return [] if batch_sizes is None else batch_sizes.tolist()


def _with_batch_sizes(options: Sequence[Any]) -> Sequence[Any]:
    return options if len(options) == 4 else (*options, None)  # a default is not passed on


@torch.no_grad()
def _recurrent(
    x: torch.Tensor, weights: list[torch.Tensor], hx: torch.Tensor, cx: torch.Tensor | None, mode: int, layers: int,
    *options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    batch_first, train, bidirectional, batch_sizes = _with_batch_sizes(options)
    sizes = _sizes(hx, cx)
    views, buffer = _in_one_buffer(x, weights, sizes, mode, layers, batch_first, bidirectional)
    stride = _stride(weights, layers, bidirectional)
    output, hy, cy, reserve, _ = _cudnn._cudnn_rnn(
        x, views, stride, buffer, hx, cx, mode, *sizes, layers, batch_first, 0.0, train, bidirectional,
        _numbers(batch_sizes), None,
    )  # fmt: skip
    return output, hy, cy if cx is not None else x.new_empty(0), reserve, buffer


def _recurrent_fake(
    x: torch.Tensor, weights: list[torch.Tensor], hx: torch.Tensor, cx: torch.Tensor | None, mode: int, layers: int,
    *options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    batch_first, train, bidirectional, batch_sizes = _with_batch_sizes(options)
    of_x = x.shape if batch_sizes is None else (1, hx.shape[1], x.shape[-1])
    of_others = [one.shape for one in (hx, *(() if cx is None else (cx,)), *weights)]
    shapes = tuple(tuple(map(int, shape)) for shape in (of_x, *of_others))
    reserve, buffer = _saved_elements(
        shapes, cx is not None, x.dtype, x.device, mode, layers, batch_first, train, bidirectional
    )
    width = hx.shape[-1] * (1 + bidirectional)
    if batch_sizes is not None:
        output, reserve = x.new_empty(x.shape[0], width), torch.library.get_ctx().new_dynamic_size()
    elif batch_first:
        output = x.new_empty(x.shape[1], x.shape[0], width).transpose(0, 1)
    else:
        output = x.new_empty(*x.shape[:2], width)
    return (
        output, hx.new_empty(hx.shape), x.new_empty(0) if cx is None else cx.new_empty(cx.shape),
        x.new_empty(reserve, dtype=torch.uint8), x.new_empty(buffer),
    )  # fmt: skip


@functools.cache
def _saved_elements(
    shapes: tuple[tuple[int, ...], ...], has_cell: bool, dtype: torch.dtype, device: torch.device, mode: int,
    layers: int, batch_first: bool, train: bool, bidirectional: bool,
) -> tuple[int, int]:  # fmt: skip
    """The elements of the reserve and of the buffer: cuDNN alone knows, so a call on zeros tells."""
    with no_dispatch_modes(), torch._C.DisableTorchFunction():
        x, hx, *rest = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        cx, weights = (rest[0], rest[1:]) if has_cell else (None, rest)
        found = _recurrent(x, weights, hx, cx, mode, layers, batch_first, train, bidirectional)
    return found[RESERVE].numel(), found[RESERVE + 1].numel()


@torch.no_grad()
def _backward(
    forward: list[torch.Tensor], weights: list[torch.Tensor], gradients: list[torch.Tensor], given: list[bool],
    mode: int, layers: int, batch_first: bool, bidirectional: bool, batch_sizes: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    x, output, reserve, buffer, hx, *cell = forward
    cx, found = cell[0] if cell else None, iter(gradients)
    stride = _stride(weights, layers, bidirectional)
    dx, dhx, dcx, dweights = torch.ops.aten._cudnn_rnn_backward.default(
        x, weights, stride, buffer, hx, cx, output, *(next(found) if is_there else None for is_there in given), mode,
        *_sizes(hx, cx), layers, batch_first, 0.0, True, bidirectional, _numbers(batch_sizes), None, reserve.clone(),
        [True, True, cx is not None, True],
    )  # fmt: skip
    states = [dhx] if cx is None else [dhx, dcx]
    return [dx, *states, *(weight.clone() for weight in dweights)]


def _backward_fake(
    forward: list[torch.Tensor], weights: list[torch.Tensor], gradients: list[torch.Tensor], given: list[bool],
    mode: int, layers: int, batch_first: bool, bidirectional: bool, batch_sizes: torch.Tensor | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    x, _, _, _, *states = forward
    dx = x.transpose(0, 1).new_empty(x.transpose(0, 1).shape).transpose(0, 1) if batch_first else x.new_empty(x.shape)
    return [dx, *(one.new_empty(one.shape) for one in (*states, *weights))]


_SHAPE = "int mode, int layers, bool batch_first"
define(
    f"recurrent(Tensor x, Tensor[] weights, Tensor hx, Tensor? cx, {_SHAPE}, bool train, bool bidirectional,"
    " Tensor? batch_sizes=None)"
    " -> (Tensor output, Tensor hy, Tensor cy, Tensor reserve, Tensor buffer)",
    _recurrent, _recurrent_fake,
)  # fmt: skip
define(
    f"recurrent_backward(Tensor[] forward, Tensor[] weights, Tensor[] gradients, bool[] given, {_SHAPE},"
    " bool bidirectional, Tensor? batch_sizes=None) -> Tensor[]",
    _backward, _backward_fake,
)  # fmt: skip


def is_reserve(node: fx.Node) -> bool:
    """Whether a node is the reserve that a recurrent layer keeps for its backward: some of it may never be written."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.target is not torch.ops.pygraph.recurrent.default:
        return False
    return bool(node.args[1] == RESERVE)
