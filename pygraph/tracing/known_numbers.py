"""Numbers that torch knows of fake tensors: read before, or given as constants. An update is to make it forget them.

Torch forgets by itself what it knows of a tensor whose version changes, and of the constant that an operation returns
updated. It does not where an update reaches other tensors of the same memory, or returns nothing, as `_foreach_add_`.
"""

# The tracer works on torch's private parts (storages' identities, proxies). Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils import _pytree as pytree

from pygraph.ir.functional_variants import written_values

_MAKE_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class KnownNumbers:
    """The constants of one trace, as ``torch.tensor(0.0)`` in the function."""

    def __init__(self) -> None:
        self._constants: list[torch.Tensor] = []

    def after_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, tracer: Any) -> None:
        """Note a constant that an operation has made, and forget numbers that it has changed."""
        if func in _MAKE_CONSTANTS:
            self._constants += [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            return
        written = list(_written(func, args, kwargs))
        for tensor in written:
            tensor.fake_mode.epoch += 1  # of which the memos are that ``item()`` fills
            if tensor.constant is not None:
                tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        for constant in self._constants if storages else ():
            slot = get_proxy_slot(constant, tracer, None)  # None in a branch of control flow
            if slot is not None and constant.untyped_storage()._cdata in storages:
                slot.constant = None


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[FakeTensor]:
    """The fake tensors that an operation may have written to."""
    if isinstance(func, torch._ops.OpOverload):
        values: Any = written_values(func, args, kwargs) if func._schema.is_mutable else ()
    else:
        values = (args, kwargs)  # control flow and kernels say it in ways of their own
    yield from (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, FakeTensor))
