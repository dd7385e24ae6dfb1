"""Operations whose fake results are not what they give on a device, or that have none."""

# Kernels are registered with torch by name. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import Any

import torch

from pygraph.errors import TraceError

aten = torch.ops.aten

_LAYER = "_transformer_encoder_layer_fwd"  # described from torch 2.13 on


def _encoder_layer(src: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(src)


_library = torch.library.Library("aten", "IMPL")
if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_LAYER}", "Meta"):
    _library.impl(_LAYER, _encoder_layer, "Meta")


def without_undescribed(target: Any, args: Any, out: Any) -> Any:
    """What an operation returns, without results that it has only as a fake."""
    if target is aten._native_multi_head_attention.default and len(args) > 10 and not args[10]:
        return out[0], None  # attention weights that nobody wants: an empty tensor (torch 2.11 to 2.13)
    if target is aten.native_batch_norm.default and not args[5] and out[0].device.type != "cuda":
        # Without training, its saved statistics are described as the running ones, as they are on CUDA. On the host
        # they are empty (torch 2.11 to 2.13).
        return out[0], aten.new_empty.default(out[1], [0]), aten.new_empty.default(out[2], [0])
    return out


def check_described(target: Any, args: Any) -> None:
    """Refuse an operation whose fake results are not what it gives on a device.

    Raises:
        TraceError: It is such an operation.
    """
    # Without training, its saved statistics are described as the running ones (torch 2.11 to 2.13).
    if target is aten._native_batch_norm_legit.default and not args[5]:
        raise TraceError(f"PyTorch describes the results of {target} wrongly")
