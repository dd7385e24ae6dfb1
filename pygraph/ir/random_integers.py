"""``pygraph::random_integers``: `torch.randint` with bounds that are live numbers, as the size of a buffer that fills.

Torch's description of ``randint`` reads the bounds, so that a trace would have them baked in. A kernel takes them by
value: it is launched between graphs.
"""

# Arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from typing import Any

import torch

from pygraph.ir.device_arguments import or_default
from pygraph.ir.ops import define


def _random_integers(low: int, high: int, size: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randint(low, high, size, dtype=dtype, device=device)


def _random_integers_fake(
    low: Any, high: Any, size: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    del low, high
    return torch.empty(size, dtype=dtype, device=device)


define(
    "random_integers(SymInt low, SymInt high, int[] size, ScalarType dtype, Device device) -> Tensor",
    _random_integers,
    _random_integers_fake,
    [torch.Tag.nondeterministic_seeded],
)

RANDOM_INTEGERS: Any = torch.ops.pygraph.random_integers.default
"""The operation."""


def random_integers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The integers that a call of `torch.randint` draws, if a bound is a live number and the rest is plain; else None.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    names = _POSITIONAL[-len(args) - sum(name in kwargs for name in _POSITIONAL) :]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    bounds = given.get("low", 0), given.get("high")
    size: Any = given.get("size")
    dtype, device = given.get("dtype"), given.get("device")
    is_plain = given.keys() <= _KNOWN and isinstance(size, (tuple, list)) and all(type(one) is int for one in size)
    are_bounds = all(isinstance(bound, (int, torch.SymInt)) for bound in bounds)
    if not is_plain or not are_bounds or not any(isinstance(bound, torch.SymInt) for bound in bounds):
        return None
    return RANDOM_INTEGERS(*bounds, list(size), dtype or torch.int64, or_default(device))


_POSITIONAL = ("low", "high", "size")
_KNOWN = frozenset({*_POSITIONAL, "dtype", "device"})
