"""Writes of values with a graph of autograd into tensors from before the trace: autograd gives these the graph.

It does so with the tensors themselves, also where the values are those of a trace. So the trace takes the graph away
again, from tensors that had none; other writes are refused before autograd sees them.
"""

# Gradients and views are read off tensors, of which torch says little.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload  # checked with torch 2.11 and 2.13
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError
from pygraph.guards.environment import Environment
from pygraph.ir.dispatch_modes import no_dispatch_modes
from pygraph.ir.functional_variants import written_values


class OutsideGraphs:
    """The tensors from before the trace that get a graph of autograd in it.

    Args:
        environment: What the function can reach besides its arguments.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._written: dict[int, torch.Tensor] = {}

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse an operation by which such a tensor gets a graph that cannot be taken away again.

        Raises:
            TraceError: It has a graph already, or is a view.
        """
        if not isinstance(func, OpOverload) or not func._schema.is_mutable or not torch.is_grad_enabled():
            return
        given = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(one, torch.Tensor) and one.requires_grad for one in given):
            return
        for tensor in pytree.tree_leaves(written_values(func, args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._check_write(tensor)

    def _check_write(self, tensor: torch.Tensor) -> None:
        owner = tensor._base if tensor._is_view() else tensor
        if owner is None or isinstance(owner, FakeTensor) or id(owner) in self._written:
            return
        if owner.is_leaf and owner.requires_grad:
            return  # autograd refuses that itself
        is_restorable = owner.is_leaf and self._environment.reaches(owner)
        if not is_restorable or (tensor is not owner and not isinstance(tensor, FakeTensor)):
            raise TraceError(
                f"it writes to {self._name(tensor)}, from before the call, which gets another graph of autograd"
            )
        self._written[id(owner)] = owner

    def restore(self) -> str | None:
        """Take the graphs away; the name of a tensor that has one at the end of the function."""
        left = [tensor for tensor in self._written.values() if not tensor.is_leaf]
        with no_dispatch_modes():
            for tensor in left:
                tensor.detach_()
        return next(map(self._name, left), None)

    def _name(self, tensor: torch.Tensor) -> str:
        return self._environment.names.get(id(tensor), "a tensor")
