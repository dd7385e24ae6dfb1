"""Rules for products of matrices that are scaled and added by numbers from the host."""

from __future__ import annotations

from typing import Any

from torch import fx

from pygraph.transforms.rules.emitter import Args, Emitter, Rule, aten


def matmul(op: Any, left: str, right: str) -> Rule:
    """``beta * self + alpha * op(left, right)``; with ``beta`` 0, ``self`` is not read, NaN or not.

    Half types: the product and the sum are float32, rounded at the end, as cuBLAS does.
    """

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        return _accumulate(emit, args, _product(emit, op, args[left], args[right]))

    return rule


def outer(emit: Emitter, args: Args) -> fx.Node | None:
    """``addr``: ``beta * self + alpha * outer(vec1, vec2)``."""
    column = emit.call(aten.unsqueeze.default, emit.cast(args["vec1"], emit.wide), 1)
    return _accumulate(emit, args, emit.call(aten.mul.Tensor, column, emit.cast(args["vec2"], emit.wide)))


def _product(emit: Emitter, op: Any, left: fx.Node, right: fx.Node) -> fx.Node:
    packet = op.overloadpacket
    if emit.wide != emit.spec.dtype and emit.cuda and "dtype" in packet.overloads():
        return emit.call(packet.dtype, left, right, emit.wide)
    return emit.call(op, emit.cast(left, emit.wide), emit.cast(right, emit.wide))


def _accumulate(emit: Emitter, args: Args, product: fx.Node) -> fx.Node | None:
    alpha, beta = emit.operand(args["alpha"], emit.wide), emit.operand(args["beta"], emit.wide)
    scaled = product if not isinstance(alpha, fx.Node) and alpha == 1 else emit.call(aten.mul.Tensor, product, alpha)
    if not isinstance(beta, fx.Node) and beta == 0:
        return emit.finish(scaled)
    added = emit.cast(args["self"], emit.wide)
    if isinstance(beta, fx.Node) or beta != 1:
        added = emit.call(aten.mul.Tensor, added, beta)
    if isinstance(beta, fx.Node):
        zero = emit.tensor(0, emit.wide)
        added = emit.call(aten.where.self, emit.call(aten.eq.Tensor, beta, zero), zero, added)
    return emit.finish(emit.call(aten.add.Tensor, added, scaled))
