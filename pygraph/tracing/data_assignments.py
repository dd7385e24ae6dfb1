"""Assignments to ``.data`` of tensors that a function closes over: these stand for others for the rest of a trace.

Autograd goes on with the tensor itself, which is a leaf as before; operations get what was assigned. A replay assigns
it afterwards, as it stores attributes.
"""

# Methods of tensors have no types here.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload  # checked with torch 2.11 and 2.13
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.guards.environment import Environment
from pygraph.guards.locations import Data, Location
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import root
from pygraph.ir.functional_variants import written_values


class DataAssignments:
    """The tensors to whose ``.data`` a function has assigned.

    Args:
        environment: What the function can reach besides its arguments.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._assigned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._updated: set[int] = set()
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what ``.data`` gave of a tensor's own memory

    def read(self, tensor: torch.Tensor, own: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The ``.data`` of a tensor; ``own`` gives that of its own memory."""
        value = self.value_of(tensor)
        if value is not None:
            return value.detach()
        found = own()
        if not isinstance(tensor, FakeTensor):
            self._own[id(found)] = tensor, found
        return found

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Have a tensor stand for a traced value, or for itself again; whether that can be done."""
        environment = self._environment
        if isinstance(tensor, FakeTensor) or not environment.reaches(tensor) or environment.reaches_weakly(tensor):
            return False
        if id(value) in self._own and self._own[id(value)][0] is tensor:
            self._assigned.pop(id(tensor), None)
            return True
        if not isinstance(value, FakeTensor) or value.requires_grad or torch.is_inference(tensor):
            return False
        if _layout(value) != _layout(tensor):
            return False
        self._assigned[id(tensor)] = tensor, value.detach()
        return True

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The traced value that a tensor stands for; None if it stands for itself."""
        found = self._assigned.get(id(tensor)) if self._assigned else None
        return None if found is None else found[1]

    def note_updates(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note an operation that updates a tensor in place which stands for another: autograd counts that."""
        if not self._assigned or not isinstance(func, OpOverload) or not func._schema.is_mutable:
            return
        for value in pytree.tree_leaves(written_values(func, args, kwargs)):
            if id(value) in self._assigned:
                self._updated.add(id(value))

    def is_updated(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has been updated in place."""
        return id(tensor) in self._updated

    def locations(self) -> tuple[Data, ...]:
        """The memory of tensors that stand for others."""
        names = self._environment.names
        return tuple(
            Data(weakref.ref(tensor), f"{names.get(id(tensor), 'a tensor')}.data")
            for tensor, _ in self._assigned.values()
        )


def drop_idle_reads(module: fx.GraphModule, locations: Iterable[Location]) -> None:
    """Delete reads of the memory of tensors that are passed it, as far as nobody uses them: a Program would hold it.

    Args:
        module: A recording, which is changed.
        locations: The locations whose values the function is passed.
    """
    passed = {id(location.tensor()) for location in locations if isinstance(location, Data)}
    if not passed:
        return
    for node in reversed(list(module.graph.nodes)):
        origin = root(node)
        if not node.users and origin.op == "get_attr" and id(getattr(module, str(origin.target), None)) in passed:
            module.graph.erase_node(node)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    spec = TensorSpec.of(tensor)
    return spec.shape, spec.stride, spec.dtype, tensor.device
