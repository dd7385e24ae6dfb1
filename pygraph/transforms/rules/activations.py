"""Rules for activation functions with a slope, threshold or scale from the host."""

from __future__ import annotations

from torch import fx

from pygraph.transforms.rules.emitter import Args, Emitter, aten


def leaky_relu(emit: Emitter, args: Args) -> fx.Node | None:
    """``self`` where positive, else ``negative_slope * self``."""
    x = emit.cast(args["self"], emit.wide)
    below = emit.call(aten.mul.Tensor, x, emit.operand(args["negative_slope"], emit.wide))
    return emit.finish(emit.call(aten.where.self, emit.call(aten.gt.Scalar, x, 0), x, below))


def threshold(emit: Emitter, args: Args) -> fx.Node | None:
    """``value`` where ``self <= threshold``, else ``self``."""
    x, dtype = args["self"], emit.spec.dtype if emit.cuda else emit.wide
    below = emit.call(aten.le.Tensor, emit.cast(x, dtype), emit.tensor(args["threshold"], dtype))
    return emit.finish(emit.call(aten.where.self, below, emit.tensor(args["value"], emit.spec.dtype), x))


def softplus(emit: Emitter, args: Args) -> fx.Node | None:
    """``log1p(exp(beta * self)) / beta``, and ``self`` where ``beta * self > threshold``."""
    x, beta = emit.cast(args["self"], emit.wide), emit.tensor(args["beta"], emit.wide)
    scaled = emit.call(aten.mul.Tensor, x, beta)
    soft = emit.call(aten.div.Tensor, emit.call(aten.log1p.default, emit.call(aten.exp.default, scaled)), beta)
    above = emit.call(aten.gt.Tensor, scaled, emit.tensor(args["threshold"], emit.wide))
    return emit.finish(emit.call(aten.where.self, above, x, soft))


def elu(emit: Emitter, args: Args) -> fx.Node | None:
    """``scale * self`` where positive, else ``scale * alpha * expm1(input_scale * self)``."""
    x = emit.cast(args["self"], emit.wide)
    alpha, scale, inner = (emit.tensor(args[name], emit.wide) for name in ("alpha", "scale", "input_scale"))
    grown = emit.call(aten.expm1.default, emit.call(aten.mul.Tensor, x, inner))
    below = emit.call(aten.mul.Tensor, grown, emit.call(aten.mul.Tensor, alpha, scale))
    above = emit.call(aten.mul.Tensor, x, scale)
    return emit.finish(emit.call(aten.where.self, emit.call(aten.gt.Scalar, x, 0), above, below))
