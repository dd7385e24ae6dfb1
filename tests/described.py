"""Everything that can be read of values, so that what calls return and leave behind can be compared with eager."""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

import pygraph


def described(value: Any, known: dict[int, int] | None = None) -> Any:
    """Everything that can be read of a value, and which of its parts are the same objects."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        return ("tensor", value.detach().cpu().double().numpy().round(4).tolist(), value.dtype, value.requires_grad)
    if isinstance(value, (int, float, str, type(None), type, types.FunctionType, types.BuiltinFunctionType)):
        return round(value, 4) if isinstance(value, float) else value
    if id(value) in known:
        return ("seen", known[id(value)])
    known[id(value)] = len(known)
    if isinstance(value, np.ndarray):
        return ("array", value.round(4).tolist())
    if isinstance(value, weakref.ref):
        return ("reference", described(value(), known))
    parts: list[Any] = [type(value)]
    if isinstance(value, dict):
        parts += [(key, described(item, known)) for key, item in value.items()]
    if isinstance(value, (collections.deque, collections.defaultdict)):
        parts.append(value.maxlen if isinstance(value, collections.deque) else value.default_factory)
    if isinstance(value, (list, tuple, collections.deque)):
        return [*parts, *(described(item, known) for item in value)]
    slots = {key: getattr(value, key) for key in getattr(value, "__slots__", ()) if hasattr(value, key)}
    attributes = {**slots, **getattr(value, "__dict__", {})}
    return [*parts, *((key, described(item, known)) for key, item in attributes.items() if key != "__weakref__")]


def check(function: Callable[..., Any], calls: Callable[[], list[tuple[Any, ...]]], *, strict: bool = False) -> Any:
    """Compare a jitted function with itself, call by call, with what it leaves behind; returns the jitted one."""
    fast = pygraph.jit(function, strict=strict)
    for args, mine in zip(calls(), calls(), strict=True):
        known: dict[int, int] = {}
        expected = described((args, function(*args)), known)
        assert described((mine, fast(*mine))) == expected
    return fast
