"""Rules for operations that choose elements by a bound, a condition, a mask or an index, or that fill tensors."""

from __future__ import annotations

import torch
from torch import fx

from pygraph.transforms.rules.emitter import Args, Emitter, Rule, aten


def clamp(emit: Emitter, args: Args) -> fx.Node | None:
    """``clamp``, ``clamp_min``, ``clamp_max``, ``hardtanh``: bounds in the result's dtype."""
    low, high = args.get("min", args.get("min_val")), args.get("max", args.get("max_val"))
    bounds = [None if bound is None else emit.tensor(bound, emit.spec.dtype) for bound in (low, high)]
    return emit.finish(emit.call(aten.clamp.Tensor, emit.cast(args["self"], emit.spec.dtype), *bounds))


def where(emit: Emitter, args: Args) -> fx.Node | None:
    """``where`` with a number on either side, or as the condition."""
    sides = [emit.tensor(args[name], emit.spec.dtype) for name in ("self", "other")]
    return emit.finish(emit.call(aten.where.self, emit.tensor(args["condition"], torch.bool), *sides))


def masked_fill(emit: Emitter, args: Args) -> fx.Node | None:
    """``masked_fill`` as a ``where``, because CUDA's kernel reads the value of a tensor on the host."""
    value = emit.tensor(args["value"], emit.spec.dtype)
    return emit.finish(emit.call(aten.where.self, args["mask"], value, args["self"]))


def index_fill(emit: Emitter, args: Args) -> fx.Node | None:
    """``index_fill`` as an ``index_put``, because CUDA's kernel reads the value of a tensor on the host."""
    if not emit.spec.shape:
        return None
    indices = [None] * (args["dim"] % len(emit.spec.shape)) + [args["index"]]
    value = emit.tensor(args["value"], emit.spec.dtype)
    return emit.finish(emit.call(aten.index_put.default, args["self"], indices, value))


def fill(name: str) -> Rule:
    """A new tensor full of the number."""

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        return emit.full(args[name])

    return rule


def scatter_value(emit: Emitter, args: Args) -> fx.Node | None:
    """``scatter`` of one number."""
    shape = list(args["index"].meta["spec"].shape)
    source = emit.call(aten.expand.default, emit.tensor(args["value"], emit.spec.dtype), shape)
    return emit.finish(emit.call(aten.scatter.src, args["self"], args["dim"], args["index"], source))
