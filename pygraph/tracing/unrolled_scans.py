"""Scans and maps over the first dimension of tensors, unrolled: each step's operations are those of the trace.

How many steps there are is known from a size. Torch has checked the body before: that it updates nothing, and gives no
memory that it takes (Dynamo traces it, in eager too). What a trace sees is a call of ``scan`` or ``map_impl``, of the
function itself, of a backward (which is a scan of its own), or of ``vmap``. It does what eager does from there: torch's
own loop calls the body for one step after the other.
"""

# Torch's higher-order operations have no public names, and are not typed. Checked with torch 2.11 and 2.13.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.map import map_dense
from torch._higher_order_ops.scan import generic_scan
from torch._higher_order_ops.utils import reenter_make_fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

MOST_OPERATIONS = 2048
"""Operations of all steps together, beyond which a scan or a map is one node, which runs between graphs.

With so many, a trace takes seconds, as that of a loop of Python does.
"""

_SCAN, _MAP = torch.ops.higher_order.scan, torch.ops.higher_order.map_impl


def steps_of(func: Any, args: Sequence[Any]) -> Callable[[], Any] | None:
    """A function that calls the body of a scan or a map for each step, and returns the results of the operation.

    None for other operations, and where there are too many steps, none, or as many as only a run knows.

    Args:
        func: An operation that is traced.
        args: Its arguments; those of a scan are its body, the carried tensors, those that it goes through, and others.
    """
    if func is _SCAN:
        body, carried, sliced, others = args
        return (lambda: _scan(body, carried, sliced, others)) if _is_short(body, carried, sliced, others) else None
    if func is _MAP:
        body, sliced, others = args
        return (lambda: map_dense(body, sliced, others)) if _is_short(body, (), sliced, others) else None
    return None


def _is_short(body: Callable[..., Any], carried: Sequence[Any], sliced: Sequence[Any], others: Sequence[Any]) -> bool:
    length: Any = sliced[0].shape[0]
    if type(length) is not int or not 0 < length <= MOST_OPERATIONS:
        return False
    with disable_proxy_modes_tracing():
        step = reenter_make_fx(body)(*carried, *(tensor.select(0, 0) for tensor in sliced), *others)
    return length * sum(node.op == "call_function" for node in step.graph.nodes) <= MOST_OPERATIONS


def _scan(body: Callable[..., Any], carried: Sequence[Any], sliced: Sequence[Any], others: Sequence[Any]) -> Any:
    """A scan by torch's loop, of which the results of steps are stacked: torch writes them in place, one by one."""
    found: list[Sequence[Any]] = []

    def step(*values: Any) -> Sequence[Any]:
        leaves = pytree.tree_leaves(body(*values), is_leaf=lambda one: one is None)
        found.append(leaves[len(carried) :])
        return leaves[: len(carried)]

    last: Any = generic_scan(step, carried, sliced, additional_inputs=others)
    steps = found[-sliced[0].shape[0] :]  # torch 2.11 calls the body once before, which may draw random numbers
    return (*last, *(None if of[0] is None else torch.stack(of) for of in zip(*steps, strict=True)))


class UnrolledScans(TorchDispatchMode):
    """A mode in which scans and maps are unrolled, for traces of a body or a branch."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether Dynamo may work under this mode (asked by torch 2.11 and 2.13)."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        steps = steps_of(func, args)
        if steps is None:
            return func(*args, **(kwargs or {}))
        with self:
            return steps()
