"""Sequences of different lengths one after the other, as `pack_padded_sequence` lays them out, and layers on them.

How many steps there are is on the host, so these operations run between graphs. What they compute with keeps to sizes
that they tell: torch's own operations describe `batch_sizes` as a tensor of the device (fake tensors of torch 2.11 to
2.13), or read its memory before there is an operation to record.

==========================  ============================================================================================
``pygraph::packed``         the steps of all sequences ``[N, *]``, and how many sequences have each step, ``[T]``
``pygraph::packed_rows``    the steps ``[N, *]`` of sequences whose ``[T]`` is known
``pygraph::unpacked``       sequences one beside the other, ``[T, B, *]`` or ``[B, T, *]``
``pygraph::lengths``        the lengths ``[B]`` of the sequences
``pygraph::packed_layer``   outputs and last states of a recurrent layer that cuDNN does not run
==========================  ============================================================================================
"""

# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

import pygraph.ir.recurrent  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers its operations
from pygraph.ir.ops import define

_torch: Any = torch


def _packed(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return _torch._pack_padded_sequence(padded, lengths, batch_first)


def _packed_fake(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    context = torch.library.get_ctx()
    rows, steps = context.new_dynamic_size(min=1), context.new_dynamic_size(min=1)
    return padded.new_empty(rows, *padded.shape[2:]), lengths.new_empty(steps)


def _packed_rows(padded: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, rows: int) -> torch.Tensor:
    lengths = _lengths(batch_sizes, padded.shape[0 if batch_first else 1])
    return _torch._pack_padded_sequence(padded, lengths, batch_first)[0]


def _packed_rows_fake(padded: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, rows: int) -> torch.Tensor:
    return padded.new_empty(rows, *padded.shape[2:])


def _unpacked(
    rows: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, batch: int, steps: int
) -> torch.Tensor:
    return _torch._pad_packed_sequence(rows, batch_sizes, batch_first, value, steps)[0]


def _unpacked_fake(
    rows: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, batch: int, steps: int
) -> torch.Tensor:
    padded = rows.new_empty(steps, batch, *rows.shape[1:])
    return padded.transpose(0, 1) if batch_first else padded


def _lengths(batch_sizes: torch.Tensor, batch: int) -> torch.Tensor:
    return (batch_sizes[None] > torch.arange(batch, device="cpu")[:, None]).sum(1)


def _lengths_fake(batch_sizes: torch.Tensor, batch: int) -> torch.Tensor:
    return batch_sizes.new_empty(batch)


def _layer(
    rows: torch.Tensor, batch_sizes: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
    name: str, has_biases: bool, layers: int, *directions: bool,
) -> list[torch.Tensor]:  # fmt: skip
    first = list(states) if name == "lstm" else states[0]
    no_dropout = 0.0
    return list(
        getattr(torch, name)(rows, batch_sizes, first, list(weights), has_biases, layers, no_dropout, *directions)
    )


def _layer_fake(
    rows: torch.Tensor, batch_sizes: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
    name: str, has_biases: bool, layers: int, train: bool, bidirectional: bool,
) -> list[torch.Tensor]:  # fmt: skip
    width = states[0].shape[-1] * (1 + bidirectional)
    return [rows.new_empty(rows.shape[0], width), *(state.new_empty(state.shape) for state in states)]


def _layer_backward(
    gradients: Sequence[torch.Tensor], given: Sequence[bool], rows: torch.Tensor, batch_sizes: torch.Tensor,
    states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in (rows, *states, *weights)]
        count = 1 + len(states)
        out = _layer(leaves[0], batch_sizes, leaves[1:count], leaves[count:], *options)
        wanted = [one for one, is_there in zip(out, given, strict=True) if is_there]
        found = torch.autograd.grad(wanted, leaves, list(gradients), allow_unused=True, materialize_grads=True)
    return [one.clone(memory_format=torch.contiguous_format) for one in found]


def _layer_backward_fake(
    gradients: Sequence[torch.Tensor], given: Sequence[bool], rows: torch.Tensor, batch_sizes: torch.Tensor,
    states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    return [one.new_empty(one.shape) for one in (rows, *states, *weights)]


define("packed(Tensor padded, Tensor lengths, bool batch_first) -> (Tensor, Tensor)", _packed, _packed_fake)
define(
    "packed_rows(Tensor padded, Tensor batch_sizes, bool batch_first, SymInt rows) -> Tensor",
    _packed_rows, _packed_rows_fake,
)  # fmt: skip
define(
    "unpacked(Tensor rows, Tensor batch_sizes, bool batch_first, float value, int batch, int steps) -> Tensor",
    _unpacked, _unpacked_fake,
)  # fmt: skip
define("lengths(Tensor batch_sizes, int batch) -> Tensor", _lengths, _lengths_fake)

_ARGUMENTS = "Tensor rows, Tensor batch_sizes, Tensor[] states, Tensor[] weights"
_OPTIONS = "str name, bool has_biases, int layers, bool train, bool bidirectional"
define(f"packed_layer({_ARGUMENTS}, {_OPTIONS}) -> Tensor[]", _layer, _layer_fake)
define(
    f"packed_layer_backward(Tensor[] gradients, bool[] given, {_ARGUMENTS}, {_OPTIONS}) -> Tensor[]",
    _layer_backward, _layer_backward_fake,
)  # fmt: skip

UNSIZED: frozenset[Any] = frozenset({
    getattr(torch.ops.pygraph, name).default for name in (
        "packed", "packed_rows", "unpacked", "lengths", "packed_layer", "packed_layer_backward", "recurrent",
        "recurrent_backward",
    )
})  # fmt: skip
"""The operations that take, and give, packed sequences without knowing how many steps these have."""


def is_on_packed(node: fx.Node) -> bool:
    """Whether a node is such an operation, and takes or gives packed sequences."""
    recurrent = node.target in (torch.ops.pygraph.recurrent.default, torch.ops.pygraph.recurrent_backward.default)
    return node.target in UNSIZED and (not recurrent or isinstance(node.args[-1], fx.Node))  # a default is left out
