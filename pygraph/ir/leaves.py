"""Leaves of a call's arguments: static ones, live numbers, tensors that share memory."""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.ir.ranges import sharing


def static_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Sequence[int], argnames: Sequence[str]
) -> frozenset[int]:
    """Leaf positions of ``(args, kwargs)`` that belong to static arguments."""
    if not argnums and not argnames:
        return frozenset()
    static: set[int] = set()
    chosen = {index % len(args) if index < 0 else index for index in argnums} if args else set[int]()
    position = 0
    for index, arg in enumerate(args):
        count = len(pytree.tree_leaves(arg))
        if index in chosen:
            static.update(range(position, position + count))
        position += count
    for name, value in kwargs.items():
        count = len(pytree.tree_leaves(value))
        if name in argnames:
            static.update(range(position, position + count))
        position += count
    return frozenset(static)


def is_live_number(leaf: Any) -> bool:
    """Whether a leaf is a number whose value is read at every call rather than baked in."""
    if isinstance(leaf, (bool, np.bool_)):
        return False
    if isinstance(leaf, (int, np.integer)):
        return -(2**63) <= int(leaf) < 2**63
    return isinstance(leaf, (float, np.floating)) and math.isfinite(leaf)


def to_number(leaf: Any) -> int | float:
    """A Python number equal to a Python or NumPy one."""
    return int(leaf) if isinstance(leaf, (int, np.integer)) else float(leaf)


def overlap_groups(leaves: Sequence[Any]) -> list[list[int]]:
    """Tensor leaves that share memory, as groups of two or more leaf positions; fakes have none."""
    return sharing(
        (index, leaf)
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
    )
