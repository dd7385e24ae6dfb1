"""Kernels of the emulated device for operations that the CPU does not have, or has otherwise."""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from pygraph.runtime.emulated.convolutions import convolution, convolution_backward

aten: Final = torch.ops.aten

Op = torch._ops.OpOverload
Kernel = Callable[..., Any]


def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    cx: torch.Tensor,
    cy: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    d_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    d_cy = (torch.zeros_like(cy) if grad_cy is None else grad_cy) + d_hy * o * (1 - t * t)
    parts = (d_cy * g * i * (1 - i), d_cy * cx * f * (1 - f), d_cy * i * (1 - g * g), d_hy * t * o * (1 - o))
    gates = torch.cat(parts, 1)
    return gates, d_cy * f, gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, iz, new), (hr, hz, hn) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hn).tanh()
    return n + z * (hx - n), torch.cat((r, z, n, hx, hn), 1)


def _gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    d_n = grad_hy * (1 - z) * (1 - n * n)
    d_r, d_z = d_n * hn * r * (1 - r), grad_hy * (hx - n) * z * (1 - z)
    d_input, d_hidden = torch.cat((d_r, d_z, d_n), 1), torch.cat((d_r, d_z, d_n * r), 1)
    d_biases = (d_input.sum(0), d_hidden.sum(0)) if has_bias else (None, None)
    return d_input, d_hidden, grad_hy * z, d_biases[0], d_biases[1]


def _group_norm(input: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """Group norm with a contiguous result, as on CUDA; the CPU keeps channels last."""
    return aten.native_group_norm(input.contiguous(), *args)


def _histc(input: torch.Tensor, *args: Any) -> torch.Tensor:
    """A histogram, of integers too, as on CUDA."""
    if input.dtype.is_floating_point:
        return aten.histc(input, *args)
    return aten.histc(input.double(), *args).to(input.dtype)


def _reduced_loss(functional: Op) -> Kernel:
    """A loss whose ``out`` kernel on the CPU resizes its result to the unreduced shape first."""

    def kernel(*args: Any, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(functional(*args))

    return kernel


REPLACEMENTS: Final[dict[str, Kernel]] = {
    "aten::mse_loss.out": _reduced_loss(aten.mse_loss.default),
    "aten::smooth_l1_loss.out": _reduced_loss(aten.smooth_l1_loss.default),
    "aten::convolution_overrideable": convolution,
    "aten::convolution_backward_overrideable": convolution_backward,
    "aten::native_group_norm": _group_norm,
    "aten::histc": _histc,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
