"""Operations that update running statistics though their schemas do not declare it; functionalization misses them."""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

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


def updates_in_hiding(args: Any) -> bool:
    """Whether one of these operations, with these arguments, updates running statistics."""
    return args[3] is not None and args[4] is not None and bool(args[5])


def written_in_hiding(target: Any, args: Any) -> list[Any]:
    """The running statistics that a call of an operation updates though its schema does not declare it."""
    return list(args[3:5]) if target in HIDDEN_WRITES and updates_in_hiding(args) else []


# The operation that torch decomposes batch norm into declares the update; batch norm does not (torch 2.11 and 2.13).
_HIDING = {*HIDDEN_WRITES, aten._native_batch_norm_legit.default}


def updated_in_hiding(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node of a recording updates without increasing their versions in eager."""
    return list(node.args[3:5]) if node.target in _HIDING and updates_in_hiding(node.args) else []  # pyright: ignore
