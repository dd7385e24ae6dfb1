"""Rules for sums, products and quotients with a number from the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pygraph.transforms.rules.emitter import Args, Emitter, HostNumber, Rule, aten


def add(left: str, right: str, sign: int) -> Rule:
    """``left + sign * alpha * right``; with ``alpha`` from the host one fused multiply-add, as CUDA's kernel."""
    op = aten.add.Tensor if sign > 0 else aten.sub.Tensor

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        a, b = _addend(emit, args[left]), _addend(emit, args[right])
        alpha = emit.operand(args["alpha"], emit.wide)
        if not isinstance(alpha, fx.Node):
            named: Args = {} if alpha == 1 else {"alpha": alpha}
            return emit.finish(emit.call(op, a, b, **named))
        if emit.wide is torch.bool:
            return None
        named = {} if sign > 0 else {"value": -1}
        return emit.finish(emit.call(aten.addcmul.default, a, b, alpha, **named))

    return rule


def _addend(emit: Emitter, value: Any) -> fx.Node:
    """CUDA adds a number in the wide dtype; the CPU rounds it to the result's dtype first."""
    if isinstance(value, HostNumber) and not emit.cuda:
        value = emit.tensor(value, emit.spec.dtype)
    return emit.tensor(value, emit.wide)


def divide(emit: Emitter, args: Args) -> fx.Node | None:
    """Division, rounded or not. CUDA multiplies by the reciprocal of a host number, and so does this."""
    mode = args.get("rounding_mode")
    a, other = emit.tensor(args["self"], emit.wide), args["other"]
    if not (isinstance(other, HostNumber) and emit.cuda and emit.wide.is_floating_point):
        return emit.finish(emit.call(aten.div.Tensor_mode, a, emit.tensor(other, emit.wide), rounding_mode=mode))
    # CUDA rounds the reciprocal once from float64 without a rounding mode, and the number first with one.
    b = emit.tensor(other, torch.float64 if mode is None else emit.wide)
    inverse = emit.cast(emit.call(aten.reciprocal.default, b), emit.wide)
    quotient = emit.call(aten.mul.Tensor, a, inverse)
    if mode == "trunc":
        quotient = emit.call(aten.trunc.default, quotient)
    elif mode == "floor":
        quotient = _floor(emit, a, b, inverse, quotient)
    return emit.finish(quotient)


def floor_divide(emit: Emitter, args: Args) -> fx.Node | None:
    """``self // other``."""
    return divide(emit, {**args, "rounding_mode": "floor"})


def _floor(emit: Emitter, a: fx.Node, b: fx.Node, inverse: fx.Node, quotient: fx.Node) -> fx.Node:
    """The floor of ``a / b``, step by step as CUDA's kernel for a host number ``b`` finds it from the remainder."""
    rest = emit.call(aten.fmod.Tensor, a, b)
    exact = emit.call(aten.mul.Tensor, emit.call(aten.sub.Tensor, a, rest), inverse)
    signs = emit.call(aten.mul.Tensor, emit.call(aten.sign.default, rest), b)
    exact = emit.call(aten.add.Tensor, exact, emit.call(aten.lt.Scalar, signs, 0), alpha=-1)
    below = emit.cast(emit.call(aten.floor.default, exact), emit.spec.dtype)
    by = emit.call(aten.sub.Tensor, exact, emit.cast(below, emit.wide))
    nearest = emit.call(aten.add.Tensor, below, emit.call(aten.gt.Scalar, by, 0.5))
    zero = emit.cast(emit.call(aten.copysign.Tensor, exact, quotient), emit.spec.dtype)
    floor = emit.call(aten.where.self, emit.call(aten.ne.Scalar, exact, 0), nearest, zero)
    infinite = emit.cast(quotient, emit.spec.dtype)
    return emit.call(aten.where.self, emit.call(aten.eq.Scalar, b, 0), infinite, floor)


def lerp(emit: Emitter, args: Args) -> fx.Node | None:
    """``lerp`` with a host weight."""
    values = [emit.tensor(args[name], emit.wide) for name in ("self", "end", "weight")]
    return emit.finish(emit.call(aten.lerp.Tensor, *values))


def addcmul(emit: Emitter, args: Args) -> fx.Node | None:
    """``self + (value * tensor1) * tensor2``, the order and the fused multiply-add of CUDA's kernel."""
    a, b, c, value = (emit.tensor(args[name], emit.wide) for name in ("self", "tensor1", "tensor2", "value"))
    return emit.finish(emit.call(aten.addcmul.default, a, emit.call(aten.mul.Tensor, b, value), c))


def addcdiv(emit: Emitter, args: Args) -> fx.Node | None:
    """``self + value * (tensor1 / tensor2)``, the order of CUDA's kernel; the CPU's multiplies first."""
    a, b, c, value = (emit.tensor(args[name], emit.wide) for name in ("self", "tensor1", "tensor2", "value"))
    if not emit.cuda:
        scaled = emit.call(aten.mul.Tensor, b, value)
        return emit.finish(emit.call(aten.add.Tensor, a, emit.call(aten.div.Tensor, scaled, c)))
    return emit.finish(emit.call(aten.addcmul.default, a, emit.call(aten.div.Tensor, b, c), value))
