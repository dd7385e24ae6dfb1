"""Operations that torch.func's transforms decompose before they differentiate or batch them.

The decompositions round differently. A call inside a transform runs below it, where torch would not decompose them.
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

# The others that torch.func treats so are composite, and decomposed into the same operations everywhere.
_FUNCTIONS = (
    torch.nn.functional.binary_cross_entropy_with_logits,
    torch.binary_cross_entropy_with_logits,
)


class Decomposing(TorchFunctionMode):
    """A mode in which these operations are decomposed, as they are inside ``torch.func.grad``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            return func(*args, **(kwargs or {}))
        with grad_increment_nesting() as level:
            result = func(*args, **(kwargs or {}))
            return functorch._unwrap_for_grad(result, level)
