"""Operations whose results have a size that depends on data, by operations whose results are padded."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import fx

from pygraph.transforms.padding.values import Builder, NoRuleError, Padded, Size, aten

Bound: TypeAlias = "int | None"
"""The most entries that there may be; None for as many as there are elements."""


class Sources:
    """Makes the operations of such results. Masks that are one node have one size.

    Args:
        build: What makes nodes.
    """

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._of_masks: dict[fx.Node, tuple[fx.Node, Size]] = {}

    def positions(self, mask: fx.Node, bound: Bound) -> tuple[fx.Node, Size]:
        """Where the elements of a tensor that are not zero are, as positions in its flat memory, which are padded by 0.

        The k-th of them is where the number of those up to it reaches k.
        """
        if mask not in self._of_masks:
            build = self._build
            flags = mask if mask.meta["spec"].dtype is torch.bool else build.call(aten.ne.Scalar, mask, 0)
            if 0 in flags.meta["spec"].shape or not flags.meta["spec"].shape:
                raise NoRuleError("there is nothing to pad")
            so_far = build.call(aten.cumsum.default, build.flat(flags), 0)
            size = self._size(so_far, bound, math.prod(flags.meta["spec"].shape))
            found = build.call(aten.searchsorted.Tensor, so_far, build.arange(1, size.bound + 1))
            self._of_masks[mask] = build.filled(Padded(found, 0, size), 0), size
        return self._of_masks[mask]

    def columns(self, mask: fx.Node, bound: Bound) -> tuple[list[fx.Node], Size]:
        """As indices, one tensor for each dimension."""
        flat, size = self.positions(mask, bound)
        shape = mask.meta["spec"].shape
        if len(shape) == 1:
            return [flat], size
        found: list[fx.Node] = []
        for dim, extent in enumerate(shape):
            step = math.prod(shape[dim + 1 :])
            index = flat if step == 1 else self._build.call(aten.floor_divide.default, flat, step)
            found.append(index if dim == 0 else self._build.call(aten.remainder.Scalar, index, extent))
        return found, size

    def known_columns(self, mask: Any) -> tuple[list[fx.Node], Size]:
        """`columns` of a mask that has chosen something before."""
        if mask not in self._of_masks:
            raise NoRuleError("its mask has chosen none of the padded tensors")
        return self.columns(mask, None)

    def nonzero(self, bound: Bound, x: fx.Node) -> Padded:
        """``nonzero``."""
        columns, size = self.columns(x, bound)
        rows = [self._build.call(aten.unsqueeze.default, column, 1) for column in columns]
        return Padded(rows[0] if len(rows) == 1 else self._build.call(aten.cat.default, rows, 1), 0, size)

    def masked_select(self, bound: Bound, x: fx.Node, mask: fx.Node) -> Padded:
        """``masked_select``."""
        shape = [*torch.broadcast_shapes(x.meta["spec"].shape, mask.meta["spec"].shape)]  # pyright: ignore
        x, mask = (
            one if list(one.meta["spec"].shape) == shape else self._build.call(aten.expand.default, one, shape)
            for one in (x, mask)
        )
        flat, size = self.positions(mask, bound)
        return Padded(self._build.call(aten.index_select.default, self._build.flat(x), 0, flat), 0, size)

    def repeat_interleave(self, bound: Bound, repeats: fx.Node, output_size: int | None = None) -> Padded:
        """``repeat_interleave`` of numbers of times alone."""
        if bound is None or output_size is not None or repeats.meta["spec"].shape == (0,):
            raise NoRuleError("it needs a bound in numbers")
        build = self._build
        build.check(build.call(aten.all.default, build.call(aten.ge.Scalar, repeats, 0)), "repeats can not be negative")
        so_far = build.call(aten.cumsum.default, repeats, 0)
        size = self._size(so_far, bound, limit=None)
        found = build.call(aten.searchsorted.Tensor, so_far, build.arange(size.bound), right=True)
        found = build.call(aten._to_copy.default, found, dtype=repeats.meta["spec"].dtype)
        return Padded(build.filled(Padded(found, 0, size), 0), 0, size)

    def unique(
        self, bound: Bound, x: fx.Node, is_sorted: bool = True, return_inverse: bool = False,
        return_counts: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """``unique`` of all elements: a value is new in a sorted tensor where it differs from the one before it."""
        del is_sorted  # CUDA sorts them always
        build, shape = self._build, x.meta["spec"].shape
        numel = math.prod(shape)
        if numel == 0 or not shape:
            raise NoRuleError("there is nothing to pad")
        values = build.call(aten.sort.default, build.flat(x))
        ordered, order = (build.item(values, index) for index in range(2))
        differ = build.call(
            aten.ne.Tensor,
            build.call(aten.slice.Tensor, ordered, 0, 1),
            build.call(aten.slice.Tensor, ordered, 0, 0, -1),
        )
        first = build.call(aten.ones.default, [1], dtype=torch.bool, device=build.device)
        so_far = build.call(aten.cumsum.default, build.call(aten.cat.default, [first, differ]), 0)
        size = self._size(so_far, bound, numel)
        begins = build.call(aten.searchsorted.Tensor, so_far, build.arange(1, size.bound + 2))
        begin = build.filled(Padded(build.call(aten.slice.Tensor, begins, 0, 0, size.bound), 0, size), 0)
        end = build.call(aten.slice.Tensor, begins, 0, 1)
        found = Padded(build.call(aten.index_select.default, ordered, 0, begin), 0, size)
        empty = build.call(aten.empty.memory_format, [0], dtype=torch.int64, device=build.device)
        inverse: Any = empty
        if return_inverse:
            places = build.call(aten.zeros_like.default, order)
            places = build.call(aten.scatter.src, places, 0, order, build.call(aten.sub.Tensor, so_far, 1))
            inverse = build.call(aten.view.default, places, list(shape))
        counts = Padded(build.call(aten.sub.Tensor, end, begin), 0, size) if return_counts else empty
        return found, inverse, counts

    def _size(self, so_far: fx.Node, bound: Bound, limit: int | None) -> Size:
        """The size that is the last of a tensor of running sums, and never more than ``limit``."""
        build = self._build
        count = build.call(aten.select.int, so_far, 0, so_far.meta["spec"].shape[0] - 1)
        if bound is None or (limit is not None and bound >= limit):
            assert limit is not None
            bound = limit
        else:
            build.check(build.call(aten.le.Scalar, count, bound), f"more than {bound} entries, which is their bound")
        return Size(bound, count, build.call(aten.ge.Tensor, build.arange(bound), count))
