"""The leaves of a call's arguments: which are static, which numbers are live, which tensors share memory."""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import enum
import math
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pygraph.environment import IMMUTABLE, Environment, is_library
from pygraph.ranges import sharing

# Of these there is one object for each value, or nobody can tell that there is not.
_SINGLETONS = (
    *IMMUTABLE, type, types.ModuleType, enum.Enum, types.EllipsisType, types.NotImplementedType,
    torch.layout, torch.memory_format, torch.qscheme,
)  # fmt: skip


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
    """Tensor leaves that share memory, as groups of two or more leaf positions."""
    return sharing((index, leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))


def is_constant(value: Any, environment: Environment) -> bool:
    """Whether all calls may return this very object: it cannot be changed, or was there before the call.

    Args:
        value: What a call returned that is no tensor.
        environment: What the function could reach before the call.
    """
    kind = type(value)
    if issubclass(kind, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    if issubclass(kind, _SINGLETONS) or environment.reaches(value):
        return True
    parts: list[Any] | None = None
    if issubclass(kind, types.FunctionType):
        if not all(environment.reaches(cell) for cell in value.__closure__ or ()):
            return False  # it may assign to a variable that each call has anew
        parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif issubclass(kind, (types.BuiltinFunctionType, types.MethodType)):
        parts = [value.__self__]
    elif kind in (tuple, frozenset):
        parts = list(value)
    elif kind is slice:
        parts = [value.start, value.stop, value.step]
    elif dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # pyright: ignore
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(kind)]
    if parts is not None:
        return all(is_constant(part, environment) for part in parts)
    # A library's values that are hashed by what they are (a Path, a Fraction); one's own may change their hash.
    return is_library(kind.__module__) and kind.__hash__ not in (None, object.__hash__)
