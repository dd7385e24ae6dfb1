"""Convolutions of the emulated device, whose results lie in memory as cuDNN's do."""

# torch has no types for what is private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch._prims_common import suggest_memory_format

from pygraph.runtime.emulated.tensors import NAME

aten: Final = torch.ops.aten

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution(input: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
    """The result, with channels last if those of the input or the weight are."""
    result: torch.Tensor = aten.convolution(input, weight, *options)
    return result.contiguous(memory_format=_memory_format(input, weight))


def convolution_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *options: Any
) -> tuple[torch.Tensor | None, ...]:
    """The gradients, those of input and weight laid out as the result is."""
    of_input, of_weight, of_bias = aten.convolution_backward(grad, input, weight, [grad.shape[1]], *options)
    layout = _memory_format(input, weight)
    laid_out = (one if one is None else one.contiguous(memory_format=layout) for one in (of_input, of_weight))
    return *laid_out, of_bias


def _memory_format(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    wanted = _CHANNELS_LAST.get(weight.dim())
    found = wanted is not None and wanted in (suggest_memory_format(input), suggest_memory_format(weight))
    return wanted if found and wanted is not None else torch.contiguous_format


def describe() -> None:
    """Have torch describe the results like that: it takes those of a device that it does not know for contiguous."""
    original = torch._C._conv_determine_backend_memory_format

    @functools.wraps(original)
    def determine(input: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        return _memory_format(input, weight) if input.device.type == NAME else original(input, weight, backend)

    torch._C._conv_determine_backend_memory_format = determine
