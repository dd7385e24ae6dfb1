"""Operations that update running statistics without saying so in their schemas; functionalization misses them."""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph.errors import TraceError

aten = torch.ops.aten


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    out, save_mean, save_invstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, training, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, save_mean, save_invstd


def _cudnn_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    out, save_mean, save_var, reserve, new_mean, new_var = aten._batch_norm_with_update_functional(
        x, weight, bias, mean, var, momentum, eps
    )
    mean.copy_(new_mean)
    var.copy_(new_var)
    return out, save_mean, save_var, reserve


HIDDEN_WRITES: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
}


def check_described(target: Any, args: Any) -> None:
    """Refuse an operation whose fake results are not what it gives on a device.

    Raises:
        TraceError: It is such an operation.
    """
    # Without training, its saved statistics are described as the running ones (torch 2.11 to 2.13).
    if target is aten._native_batch_norm_legit.default and not args[5]:
        raise TraceError(f"PyTorch describes the results of {target} wrongly")
