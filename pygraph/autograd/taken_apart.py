"""Operations that torch.func's transforms take apart before they differentiate or batch them.

The parts round otherwise. A call inside a transform runs below it, where torch would not take them apart.
"""

# They have no public names. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch
from torch._C import _functorch as functorch  # pyright: ignore
from torch._functorch.eager_transforms import grad_increment_nesting
from torch.overrides import TorchFunctionMode

# The others that torch.func treats so are composite, and taken apart into the same parts everywhere.
_FUNCTIONS = (
    torch.nn.functional.binary_cross_entropy_with_logits,
    torch.binary_cross_entropy_with_logits,
)


class TakenApart(TorchFunctionMode):
    """Have them taken apart, as inside of a derivative of nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            return func(*args, **(kwargs or {}))
        with grad_increment_nesting() as level:
            result = func(*args, **(kwargs or {}))
            return functorch._unwrap_for_grad(result, level)
