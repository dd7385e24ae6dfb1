"""Operations that functionalization leaves as they are: those on memory that nothing writes to, which are most.

Such an operation need not be traced again: its node is copied into the functional graph, with what the first run found
out about its results. One is traced again where its memory has been written to, or where its arguments have another
layout than in the first run.
"""

# The tracer works on torch's private parts (storages' identities) and on values of any type. Checked with torch 2.11
# and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import fx
from torch._C._functorch import _wrap_functional_tensor, current_level
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pygraph.ir.effects import argument_nodes, is_first_gradient, is_operation, is_view, written_arguments
from pygraph.ir.program import output_values
from pygraph.ir.scopes import came_from
from pygraph.tracing.hidden_writes import HIDDEN_WRITES, updated_in_hiding

aten = torch.ops.aten

COPIED: Any = object()
"""The value of a node that was copied, until an operation that is traced again takes it."""

AGAIN: Any = object()
"""No value: the node is to be traced again."""


class UnwrittenValues:
    """Copies the nodes of a recording that no write concerns to the graph of the trace under way.

    Args:
        graph: The graph of the recording.
        whole: Positions of the results that are returned with all of their memory.
    """

    def __init__(self, graph: fx.Graph, whole: Iterable[int]) -> None:
        self._memory = _Memory(graph, whole)
        self._reshapes = any(map(_is_reshaped_in_place, graph.nodes))
        self._written: set[int] = set()  # the memory that has been written to up to here
        self._copies: dict[fx.Node, fx.Node] = {}

    def value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """The value of a node; `COPIED` if it has been copied, `AGAIN` if it is to be traced again.

        Args:
            node: The node.
            values: The values of the nodes before it.
        """
        if node.target in _SAME and not self._reshapes:
            source: Any = node.args[0]
            self.make([source], values)
            return values[source]
        if self._memory.stays(node) and self._copy(node, values):
            return COPIED
        self._written |= self._memory.written_by[node]
        return AGAIN

    def make(self, nodes: Iterable[fx.Node], values: dict[fx.Node, Any]) -> None:
        """Make the values of nodes that were copied, from what they were in the first run."""
        tracer = _tracer()
        for node in nodes:
            if values.get(node) is not COPIED:
                continue
            value: Any = node.meta.get("val")
            if value is not None:  # as a gradient that nobody wants
                proxy = proxy_tensor._ProxyTensor(fx.Proxy(self._copies[node], tracer), None)
                with torch._C.DisableTorchFunction():
                    proxy_tensor.set_proxy_slot(value, tracer, proxy)
                    value = _wrap_functional_tensor(value, current_level())
            values[node] = value

    def _copy(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
        """Copy a node to the graph of the trace; False if its arguments are not as in the first run."""
        tracer = _tracer()
        arguments: dict[fx.Node, fx.Node] = {}
        with torch._C.DisableTorchFunction():
            for argument in node.all_input_nodes:
                found = self._argument(argument, values[argument], tracer)
                if found is None:
                    return False
                arguments[argument] = found
        target: Any = node.target
        graph: fx.Graph = tracer.graph
        name = None if target is operator.getitem else graph._target_to_str(target.overloadpacket.__name__)
        args, kwargs = map_arg((node.args, node.kwargs), arguments.__getitem__)  # pyright: ignore
        copy = graph.create_node("call_function", target, args, kwargs, name)  # pyright: ignore[reportArgumentType]
        copy.meta = {"val": node.meta.get("val"), **came_from(node)}
        if is_first_gradient(node):
            copy.meta["first_gradient"] = True
        self._copies[node] = copy
        return True

    def _argument(self, argument: fx.Node, value: Any, tracer: Any) -> fx.Node | None:
        """The node that stands for an argument in the graph of the trace; None if it is not as in the first run."""
        recorded: Any = argument.meta.get("val")
        if value is COPIED and isinstance(recorded, (list, tuple)):
            return self._copies[argument]
        if not _is_known(recorded) or _storage(recorded) in self._written:
            return None
        if value is COPIED:
            return self._copies[argument]
        inner = _torch._from_functional_tensor(value) if _torch._is_functional_tensor(value) else value
        found = proxy_tensor.get_proxy_slot(inner, tracer, None)
        return found.proxy.node if found is not None and _have_one_layout(inner, recorded) else None


class _Memory:
    """The memory of the values of a recording, and when it is written to.

    Attributes:
        written_by: The memory that each node writes to, or may write to.
    """

    def __init__(self, graph: fx.Graph, whole: Iterable[int]) -> None:
        nodes, results = list(graph.nodes), output_values(graph)
        with torch._C.DisableTorchFunction():
            self.written_by = {node: _written_storages(node) for node in nodes}
            self._of = {node: set(map(_storage, _tensors(node))) for node in nodes}
        # The memory of a copied view is not known to be larger than the view: such a result is one of a late view.
        self.written_by[nodes[-1]] = {storage for position in whole for storage in self._of[results[position]]}
        self._order = {node: index for index, node in enumerate(nodes)}
        self._makers: dict[int, fx.Node] = {}
        self._written: dict[int, int] = {}
        for node in nodes:
            # Several results are picked before they are used; a view may be one of a closed-over tensor.
            if not isinstance(node.meta.get("val"), (list, tuple)) and not is_view(node):
                for storage in self._of[node]:
                    self._makers.setdefault(storage, node)
            for storage in self.written_by[node]:
                self._written.setdefault(storage, self._order[node])
        self._late: set[fx.Node] = set()
        for node in reversed(nodes):
            if any(self._is_late(node, storage) for storage in self._of[node] & self._written.keys()):
                self._late.add(node)

    def _is_late(self, node: fx.Node, storage: int) -> bool:
        """Whether a node is a view of this memory that is used, or of which a view is, when that is written to."""
        if self._makers.get(storage) is node:
            return False
        first = self._written[storage]
        return any(
            self._order[user] >= first or (user in self._late and storage in self._of[user]) for user in node.users
        )

    def stays(self, node: fx.Node) -> bool:
        """Whether an operation is the same if nothing is written: its results are new, or are not late views."""
        if node.op != "call_function" or node in self._late:
            return False
        value = node.meta.get("val")
        if node.target is operator.getitem:
            several: Any = node.args[0]
            return _is_known(value) or several.meta["val"][node.args[1]] is None
        if not _is_called_as_it_is(node.target):
            return False
        if not isinstance(value, (list, tuple)):
            return _is_known(value)
        return all(user.target is operator.getitem and self.stays(user) for user in node.users)


@functools.cache
def _is_called_as_it_is(target: Any) -> bool:
    """Whether functionalization calls the very operation where nothing is written."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, target.name()
    composed = has(name, "CompositeImplicitAutograd") or has(name, "FuncTorchDynamicLayerFrontMode")
    return not composed and target not in HIDDEN_WRITES and target not in _LIFTS


# They wrap a tensor from outside.
_LIFTS = (aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)

# They have the memory and the layout of what they are given.
_SAME = (aten.alias.default, aten.detach.default)

# Private.
_torch: Any = torch


def _tracer() -> Any:
    mode: Any = proxy_tensor.get_proxy_mode()
    return mode.tracer


def _is_reshaped_in_place(node: fx.Node) -> bool:
    target: Any = node.target
    return is_operation(node) and torch.Tag.inplace_view in target.tags


def _written_storages(node: fx.Node) -> set[int]:
    """The memory that a node writes to, or may write to."""
    if node.op != "call_function" or node.target is operator.getitem:
        return set()
    written: Iterable[fx.Node] = [*written_arguments(node), *updated_in_hiding(node)]
    if not is_operation(node):  # as control flow
        written = argument_nodes(node)
    return {_storage(value) for one in written for value in _tensors(one)}


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    return (value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_known(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is an ordinary tensor of a known layout."""
    if type(value) is not FakeTensor or value.layout != torch.strided or value._is_zerotensor():
        return False
    return _are_numbers(value)


def _have_one_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not _are_numbers(one):  # the size of data, whose number the first run has asked for
        return False
    return (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())


def _are_numbers(tensor: torch.Tensor) -> bool:
    """Whether the layout of a tensor is made of numbers, and not of symbols."""
    layout: tuple[Any, ...] = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return all(type(number) is int for number in layout)
