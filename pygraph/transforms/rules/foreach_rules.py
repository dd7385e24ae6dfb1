"""Rules for operations on lists of tensors (``torch._foreach_add_``, of optimizers) with a number from the host.

Where one kernel for the whole list can take the number from the device (`ONE_KERNEL`), it stays one operation.
Otherwise there is one operation per entry, by the rule for single tensors (`PER_ENTRY`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec
from pygraph.transforms.rules.arithmetic import addcdiv, addcmul
from pygraph.transforms.rules.emitter import Args, Emitter, Rule, aten
from pygraph.transforms.rules.families import wide
from pygraph.transforms.rules.scalar_rules import RULES


def _addcmul(emit: Emitter, args: Args) -> fx.Node | None:
    """``self + value * (tensor1 * tensor2)``, the order of CUDA's kernel for lists; the CPU has none of its own."""
    if not emit.cuda:
        return addcmul(emit, args)
    a, b, c, value = (emit.tensor(args[name], emit.wide) for name in ("self", "tensor1", "tensor2", "value"))
    return emit.finish(emit.call(aten.addcmul.default, a, emit.call(aten.mul.Tensor, b, c), value))


_BOTH = ("Scalar", "ScalarList")

PER_ENTRY: dict[Any, tuple[Rule, Args, tuple[str, ...]]] = {
    getattr(packet, overload): (rule, defaults, names)
    for packet, overloads, rule, defaults, names in (
        (aten._foreach_add, (*_BOTH, "Tensor"), RULES[aten.add.Scalar], {"alpha": 1}, ("self", "other", "alpha")),
        (aten._foreach_sub, _BOTH, RULES[aten.sub.Scalar], {"alpha": 1}, ("self", "other")),
        (aten._foreach_add, ("List",), RULES[aten.add.Tensor], {"alpha": 1}, ("self", "other", "alpha")),
        (aten._foreach_mul, (*_BOTH, "Tensor"), RULES[aten.mul.Scalar], {}, ("self", "other")),
        # CUDA's kernel for lists does divide, other than the one for a single tensor.
        (aten._foreach_div, (*_BOTH, "Tensor"), wide(aten.div.Tensor, "self", "other"), {}, ("self", "other")),
        (aten._foreach_clamp_min, _BOTH, RULES[aten.clamp_min.default], {}, ("self", "min")),
        (aten._foreach_clamp_max, _BOTH, RULES[aten.clamp_max.default], {}, ("self", "max")),
        (aten._foreach_maximum, _BOTH, RULES[aten.clamp_min.default], {}, ("self", "min")),
        (aten._foreach_minimum, _BOTH, RULES[aten.clamp_max.default], {}, ("self", "max")),
        (aten._foreach_lerp, _BOTH, RULES[aten.lerp.Scalar], {}, ("self", "end", "weight")),
        (aten._foreach_pow, ("ScalarAndTensor",), RULES[aten.pow.Scalar], {}, ("self", "exponent")),
        (aten._foreach_addcmul, _BOTH, _addcmul, {"value": 1}, ("self", "tensor1", "tensor2", "value")),
        (aten._foreach_addcdiv, _BOTH, addcdiv, {"value": 1}, ("self", "tensor1", "tensor2", "value")),
    )
    for overload in overloads
}
"""By operation: the rule for one entry, defaults of arguments, and the rule's names for the arguments in turn."""

ONE_KERNEL: dict[Any, Any] = {
    aten._foreach_add.Scalar: aten._foreach_add.Tensor,
    aten._foreach_mul.Scalar: aten._foreach_mul.Tensor,
    aten._foreach_div.Scalar: aten._foreach_div.Tensor,
}
"""Operations whose number may as well be a tensor, which they read on the device."""


def one_dtype(specs: Any) -> torch.dtype | None:
    """The dtype of all entries, if they are of one in which eager computes; None otherwise."""
    dtypes = {spec.dtype if isinstance(spec, TensorSpec) else None for spec in specs}
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} else None
