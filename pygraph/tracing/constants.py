"""Small tensors on the host whose values a trace knows, in operations with numbers that it does not know.

`torch.tensor(0.0)` is such a constant: torch computes what is made of it while it traces, so that Python may decide by
it. With a float of the device (`torch.tensor(0.0) + error.item()`), it would compute with the value that this number
happened to have, and note nothing (fake tensors of torch 2.11 to 2.13; of integers they think).
"""

# Values of arguments are of any type; schemas of operations are private (checked with torch 2.11 and 2.13).
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor  # `constant` and its aliases checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree


def without_constants(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """Have an operation compute no constant if it takes a number that is not known."""
    return _without_constants(func, args, kwargs) if any(map(_is_unknown, (*args, *kwargs.values()))) else _NOTHING


def _is_unknown(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or (type(value) in (list, tuple) and any(map(_is_unknown, value)))


_NUMBERS = (torch.SymFloat, torch.SymBool)

_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _without_constants(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Generator[None, None, None]:
    leaves = pytree.tree_leaves((args, kwargs))
    known = [(leaf, leaf.constant) for leaf in leaves if isinstance(leaf, FakeTensor) and leaf.constant is not None]
    is_update = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
    for tensor, constant in known:
        if is_update:
            tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(constant)
        tensor.constant = None
    try:
        yield
    finally:
        for tensor, constant in known:
            if not is_update:
                tensor.constant = constant
