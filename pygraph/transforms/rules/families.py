"""Rules for operations that differ only in the dtype in which their operands meet."""

from __future__ import annotations

from typing import Any

from torch import fx

from pygraph.transforms.rules.emitter import Args, Emitter, Rule


def wide(op: Any, *operands: str) -> Rule:
    """``op`` on tensors in the dtype that eager computes in."""

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        values = [emit.tensor(args[name], emit.wide) for name in operands]
        return emit.finish(emit.call(op, *values))

    return rule


def common(op: Any, *operands: str) -> Rule:
    """``op`` on tensors in the result's dtype."""

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        return emit.finish(emit.call(op, *(emit.tensor(args[name], emit.spec.dtype) for name in operands)))

    return rule


def compare(op: Any) -> Rule:
    """A comparison, made in the dtype that both sides promote to."""

    def rule(emit: Emitter, args: Args) -> fx.Node | None:
        left, right = args["self"], args["other"]
        dtype = emit.common(left, right)
        return emit.finish(emit.call(op, emit.tensor(left, dtype), emit.tensor(right, dtype)))

    return rule
