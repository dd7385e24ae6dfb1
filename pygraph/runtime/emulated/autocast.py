"""Autocast on the emulated device."""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

from pygraph.runtime.emulated.dynamo import hide_from_dynamo
from pygraph.runtime.emulated.tensors import NAME, is_emulated
from pygraph.runtime.emulated.traits import Op

aten: Final = torch.ops.aten

# What autocast runs in lower precision on CUDA, the usual ones. The list of what it runs in float32 is not emulated.
LOWER_PRECISION: Final[tuple[Op, ...]] = (
    *(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.linear.default, aten.addmm.default),
    *(aten.baddbmm.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    aten.scaled_dot_product_attention.default,
)


@hide_from_dynamo
def cast_and_run(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Run an operation with floating-point arguments in autocast's dtype."""
    dtype = torch.get_autocast_dtype(NAME)

    def cast(value: Any) -> Any:
        eligible = is_emulated(value) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible else value

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):  # pyright: ignore
        args, kwargs = pytree.tree_map(cast, (args, kwargs))
        return op(*args, **kwargs)
