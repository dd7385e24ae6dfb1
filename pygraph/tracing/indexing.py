"""Indexing by integers that are live, or that only a run knows: by ``select``, as torch does for known integers."""

# What tensors are indexed by is of any type, and whether a number is known is in torch's private parts.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13

from pygraph.ir.effects import MASKS
from pygraph.tracing.live_numbers import LiveInt


def selected(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, tuple[Any, ...]] | None:
    """The view that the live and unknown integers of an index select, and the rest of it; None if there are none.

    Eager reads the value of an integer tensor without dimensions, and so do runs.
    """
    items = index if type(index) is tuple else (index,)
    if not any(map(_is_unknown, items)):
        return None
    sizes = [_dimensions(item) for item in items]
    if None in sizes or sum(item is ... for item in items) > 1:
        return None
    left = tensor.dim() - sum(size for size in sizes if size is not None)
    rest: list[Any] = []
    at = 0
    for item, size in zip(items, sizes, strict=True):
        if _is_unknown(item):
            number: Any = item.item() if isinstance(item, torch.Tensor) else item
            tensor = tensor.select(at, number)
        else:
            rest.append(item)
            # Each of these is a dimension still, also an integer that is known.
            at += left if item is ... else size or 0
    return tensor, tuple(rest)


def selected_by_live(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, tuple[Any, ...]] | None:
    """The view of `selected`, if there are only live integers in an index, and none that a run has to ask for."""
    items = index if type(index) is tuple else (index,)
    unknown = [item for item in items if _is_unknown(item)]
    return selected(tensor, index) if all(isinstance(item, LiveInt) for item in unknown) else None


def _is_unknown(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        integral = not (item.dtype.is_floating_point or item.dtype.is_complex)
        plain = item.dim() == 0 and item.dtype not in MASKS
        return integral and plain and not is_functorch_wrapped_tensor(item)
    if isinstance(item, LiveInt) and item.source is not None:
        return True
    return isinstance(item, torch.SymInt) and not item.node.has_hint()


def _dimensions(item: Any) -> int | None:
    """The number of dimensions that a part of an index takes; None if that is not known."""
    if item is None or item is ... or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor):
        return item.dim() if item.dtype in MASKS else 1
    return 1 if isinstance(item, (int, slice, torch.SymInt)) else None
