"""Operations whose fake implementations are missing, or differ from the device's."""

# Kernels are registered with torch by name. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import Any

import torch

from pygraph.errors import TraceError

aten = torch.ops.aten


def _encoder_layer(src: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(src)


def _gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    return hy, hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    rows, width = workspace.shape[0], 3 * (workspace.shape[1] // 5)
    input_gates, hidden_gates = workspace.new_empty(rows, width), workspace.new_empty(rows, width)
    hx = torch.empty_like(grad_hy, memory_format=torch.contiguous_format)
    if not has_bias:
        return input_gates, hidden_gates, hx, None, None
    return input_gates, hidden_gates, hx, workspace.new_empty(width), workspace.new_empty(width)


_library = torch.library.Library("aten", "IMPL")
for _name, _description in (
    ("_transformer_encoder_layer_fwd", _encoder_layer),  # described from torch 2.13 on
    ("_thnn_fused_gru_cell", _gru_cell),
    ("_thnn_fused_gru_cell_backward", _gru_cell_backward),
):
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _library.impl(_name, _description, "Meta")


def without_undescribed(target: Any, args: Any, out: Any) -> Any:
    """The result of an operation, without parts that only its fake implementation returns."""
    if target is aten._native_multi_head_attention.default and len(args) > 10 and not args[10]:
        return out[0], None  # attention weights that nobody wants: an empty tensor (torch 2.11 to 2.13)
    if target is aten.native_batch_norm.default and not args[5] and out[0].device.type != "cuda":
        # Without training, its saved statistics are described as the running ones, as they are on CUDA. On the host
        # they are empty (torch 2.11 to 2.13).
        return out[0], aten.new_empty.default(out[1], [0]), aten.new_empty.default(out[2], [0])
    return out


def check_described(target: Any, args: Any) -> None:
    """Refuse an operation whose fake results differ from the device's.

    Raises:
        TraceError: It is such an operation.
    """
    # Without training, its saved statistics are described as the running ones (torch 2.11 to 2.13).
    if target is aten._native_batch_norm_legit.default and not args[5]:
        raise TraceError(f"PyTorch describes the results of {target} wrongly")
