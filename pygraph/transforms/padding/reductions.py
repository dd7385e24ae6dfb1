"""Rules of operations that reduce a padded dimension: padding is what contributes nothing to the result."""

from __future__ import annotations

from typing import Any

import torch

from pygraph.transforms.padding.rows import Rule, by_rows, dims_of, padded_in, pointwise, size_of
from pygraph.transforms.padding.values import Builder, NoRuleError, Padded, aten


def reduction(padding: float) -> Rule:
    """A reduction to whose result elements of this value contribute nothing."""

    def rule(build: Builder, op: Any, x: Padded, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = () if dims is None else (dims, *args)
        if dims is not None and x.dim not in dims_of(x, dims):
            return by_rows(build, op, x, *given, **kwargs)
        return build.call(op, build.filled(x, padding), *given, **kwargs)

    return rule


def mean(build: Builder, op: Any, x: Padded, dims: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``mean`` as a sum, divided by the number of elements that are real."""
    if dims is not None and x.dim not in dims_of(x, dims):
        return by_rows(build, op, x, dims, *args, **kwargs)
    dtype = kwargs.get("dtype") or x.spec.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    reduced = dims_of(x, dims if dims is not None else list(range(len(x.spec.shape))))
    total = build.call(aten.sum.dim_IntList, build.filled(x, 0), sorted(reduced), *args, dtype=wide)
    count = build.call(aten._to_copy.default, x.size.count, dtype=wide)
    others = torch.Size(x.spec.shape[dim] for dim in reduced - {x.dim}).numel()
    if others != 1:
        count = build.call(aten.mul.Tensor, count, others)
    found = build.call(aten.div.Tensor, total, count)
    return found if wide == dtype else build.call(aten._to_copy.default, found, dtype=dtype)


def pointwise_loss(position: int) -> Rule:
    """A loss of each element, and its mean or sum.

    Args:
        position: Which argument says whether it is reduced: 0 for not, 1 for the mean, 2 for the sum.
    """

    def rule(build: Builder, op: Any, *args: Any) -> Any:
        given = [*args, *[None] * (position - len(args))]
        reduced = given[position] if len(given) > position else 1
        found = pointwise(build, op, *given[:position], 0, *given[position + 1 :])
        if reduced == 0:
            return found
        return mean(build, aten.mean.default, found) if reduced == 1 else reduction(0)(build, aten.sum.default, found)

    return rule


def nll_loss(build: Builder, op: Any, x: Any, target: Any, weight: Any, reduced: int, ignored: int) -> Any:
    """``nll_loss`` of rows, of which those that are padding are ignored."""
    if not (isinstance(x, Padded) and isinstance(target, Padded) and x.dim == target.dim == 0 and target.behind == 0):
        raise NoRuleError("only one of its operands is padded")
    size = size_of((x, target))
    if isinstance(weight, Padded):
        raise NoRuleError("its weights are padded")
    target = Padded(build.filled(target, ignored), 0, size)
    if reduced == 0:
        found = build.call(op, x.node, target.node, weight, reduced, ignored)
        return Padded(build.item(found, 0), 0, size), build.item(found, 1)
    return build.call(op, x.node, target.node, weight, reduced, ignored)


def product(first: int) -> Rule:
    """A product of matrices, or of batches of them: of padded rows, padded columns, a padded batch, or over padding.

    Args:
        first: Which argument is the first factor; one before it is added.
    """

    def rule(build: Builder, op: Any, *args: Any, **kwargs: Any) -> Any:
        left, right = args[first], args[first + 1]
        inner = [isinstance(one, Padded) and one.behind == behind for one, behind in ((left, 0), (right, 1))]
        if not any(inner):
            return by_rows(build, op, *args, **kwargs)
        if not all(inner) or padded_in(args[:first]):
            raise NoRuleError("one of its factors is padded along the dimension that it sums over, and one is not")
        size_of((left, right))
        return build.call(op, *args[:first], build.filled(left, 0), build.filled(right, 0), **kwargs)

    return rule
