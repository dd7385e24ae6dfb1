"""Padded tensors in a graph, and the nodes that are made of them."""

# Arguments and results of operations are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.ir.descriptors import Spec, TensorSpec
from pygraph.transforms.host_values.graph_edit import GraphEdit

aten: Any = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Size:
    """A size that depends on data, and its bound.

    Attributes:
        bound: The size of padded dimensions.
        count: A node: how many entries are real, an int64 of no dimensions on the device.
        surplus: A node: which entries are padding, ``bool[bound]``.
    """

    bound: int
    count: fx.Node
    surplus: fx.Node


@dataclasses.dataclass(frozen=True)
class Padded:
    """A tensor of which one dimension is padded. Entries that are padding have any values.

    Attributes:
        node: The padded tensor.
        dim: The dimension, not negative.
        size: Its size.
    """

    node: fx.Node
    dim: int
    size: Size

    @property
    def spec(self) -> TensorSpec:
        """The padded tensor's."""
        return self.node.meta["spec"]

    @property
    def behind(self) -> int:
        """How many dimensions are behind the padded one."""
        return len(self.spec.shape) - 1 - self.dim


@dataclasses.dataclass(frozen=True)
class Number:
    """A size that depends on data as a number, or a multiple of it."""

    size: Size
    times: int = 1

    def of_bound(self, more: int = 0) -> int:
        """The number if nothing were padding, or if there were more entries."""
        return (self.size.bound + more) * self.times


class NoRuleError(Exception):
    """An operation takes a padded tensor in a way in which padding would change its result."""


class Builder:
    """Makes nodes before ``at``, with the source line and scopes of that node.

    Args:
        edit: The graph that is edited.

    Attributes:
        at: The operation that is being rewritten.
    """

    def __init__(self, edit: GraphEdit) -> None:
        self._edit = edit
        self.device = edit.device
        self._numbers: dict[Number, fx.Node] = {}
        self.at: fx.Node = next(iter(edit.graph.nodes))

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node; sizes among its arguments are their bounds.

        Raises:
            NoRuleError: The operation does not take tensors of these shapes.
        """
        args, kwargs = pytree.tree_map_only(Number, Number.of_bound, (args, kwargs))
        return self._edit.call(op, args, kwargs, self._on_device(evaluated(op, args, kwargs)), self.at)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """One of several results."""
        return self._edit.call(operator.getitem, (node, index), {}, node.meta["spec"][index], self.at)

    def unknown(self, op: Any, *args: Any) -> fx.Node:
        """A new node of a tensor whose shape only a run knows."""
        return self._edit.call(op, args, {}, None, self.at)

    def number(self, number: Number) -> fx.Node:
        """The node of a number, which the host reads unless only the device uses it."""
        if number not in self._numbers:
            count = number.size.count
            if number.times != 1:
                count = self.call(aten.mul.Tensor, count, number.times)
            self._numbers[number] = self._edit.call(aten._local_scalar_dense.default, (count,), {}, int, self.at)
        return self._numbers[number]

    def check(self, holds: fx.Node, message: str) -> None:
        """A new node that ends the process's use of the device, with an error, unless ``holds``."""
        self._edit.call(aten._assert_async.msg, (holds, message), {}, None, self.at)

    def arange(self, *ends: int) -> fx.Node:
        """The integers from the first end, or from 0, up to the other one, which is not among them."""
        op = aten.arange.default if len(ends) == 1 else aten.arange.start
        return self.call(op, *ends, dtype=torch.int64, device=self.device)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """The tensor in contiguous memory."""
        spec = node.meta["spec"]
        dense = torch.empty(spec.shape, device="meta").stride()
        return (
            node if spec.stride == dense else self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        )

    def flat(self, node: fx.Node) -> fx.Node:
        """The elements in the order of the tensor's indices."""
        return self.call(aten.view.default, self.contiguous(node), [-1])

    def filled(self, padded: Padded, value: float) -> fx.Node:
        """The tensor with ``value`` wherever it is padding."""
        mask = padded.size.surplus
        for _ in range(padded.behind):
            mask = self.call(aten.unsqueeze.default, mask, -1)
        kind = bool if padded.spec.dtype is torch.bool else type(value)
        return self.call(aten.masked_fill.Scalar, padded.node, mask, kind(value))

    def _on_device(self, spec: Spec) -> Spec:
        if isinstance(spec, tuple):
            return tuple(map(self._on_device, spec))
        return dataclasses.replace(spec, device=self.device) if isinstance(spec, TensorSpec) else spec


def as_it_is(node: fx.Node) -> int | None:
    """No dimension of any tensor."""
    del node
    return None


def evaluated(op: Any, args: Any, kwargs: Any, larger: Callable[[fx.Node], int | None] = as_it_is) -> Spec:
    """The spec of an operation's result, worked out on the meta device.

    Args:
        op: The operation.
        args: Its arguments; nodes for tensors.
        kwargs: Its keyword arguments.
        larger: The dimension of a node's tensor that is taken to be larger by one; None for as it is.

    Raises:
        NoRuleError: The operation does not take such tensors.
    """

    def on_meta(node: fx.Node) -> Any:
        spec, dim = node.meta["spec"], larger(node)
        if isinstance(spec, type) and torch.Tag.pointwise in op.tags:
            return spec(2)
        if not isinstance(spec, TensorSpec):
            raise NoRuleError("it takes something whose shape only a run knows")
        if dim is None:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        shape = [size + (index == dim) for index, size in enumerate(spec.shape)]
        return torch.empty(shape, dtype=spec.dtype, device="meta")

    args, kwargs = pytree.tree_map_only(fx.Node, on_meta, (args, kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        result = op(*args, **kwargs)
    except (RuntimeError, IndexError, NotImplementedError) as error:
        raise NoRuleError("it does not take a padded tensor") from error
    if isinstance(result, torch.Tensor):
        return TensorSpec.of(result)
    if isinstance(result, Sequence) and all(isinstance(one, torch.Tensor) for one in result):
        return tuple(map(TensorSpec.of, result))
    raise NoRuleError("its result is no tensor")
