"""Emission of the nodes that a rule replaces an operation by, each with its spec and the user's source line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx

import pygraph.ir.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers pygraph::scalar
from pygraph.ir.descriptors import Spec, TensorSpec
from pygraph.ir.scopes import came_from

aten: Any = torch.ops.aten
SCALAR: Any = torch.ops.pygraph.scalar.default
ITEM: Any = aten._local_scalar_dense.default

Args: TypeAlias = "dict[str, Any]"
Rule: TypeAlias = "Callable[[Emitter, Args], fx.Node | None]"


@dataclasses.dataclass(frozen=True)
class HostNumber:
    """A number from the host as an operand.

    Attributes:
        value: The node that computes it, or the number itself if it is a constant.
        promotes_as: Its part in type promotion: a Python number, or a 0-d meta tensor for a 0-d CPU tensor.
    """

    value: fx.Node | int | float | bool
    promotes_as: Any


class Emitter:
    """Puts new nodes before ``node``, each with its spec and the user's source line.

    Args:
        graph: The graph that is edited.
        node: The operation that is being rewritten.
        device: The device it runs on.
        spec: The spec of the result that the new nodes compute.
        scalar: Called as ``scalar(number, dtype)``; returns a node of a 0-d device tensor of that number, which
            is a node or a constant.
    """

    def __init__(
        self,
        graph: fx.Graph,
        node: fx.Node,
        device: torch.device,
        spec: TensorSpec,
        scalar: Callable[[Any, torch.dtype], fx.Node],
    ) -> None:
        self.graph, self.node, self.device, self.spec, self._scalar = graph, node, device, spec, scalar

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which eager torch computes a result of this node's dtype."""
        return torch.float32 if self.spec.dtype in (torch.float16, torch.bfloat16) else self.spec.dtype

    @property
    def cuda(self) -> bool:
        """Whether eager torch runs CUDA's kernels; otherwise the CPU's."""
        return self.device.type == "cuda"

    def call(self, op: Any, *args: Any, spec: Spec = None, **kwargs: Any) -> fx.Node:
        """A new node; its spec is worked out on the meta device unless given."""
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(op, args, kwargs)
        if spec is None:
            values = fx.map_arg((args, kwargs), lambda arg: _meta_tensor(arg.meta["spec"]))
            result = op(*values[0], **values[1])
            spec = dataclasses.replace(TensorSpec.of(result), device=self.device)
        old = self.node.meta
        new.meta = {"spec": spec, **came_from(self.node), "from": "devicify", "order": old.get("order")}
        return new

    def common(self, *operands: Any) -> torch.dtype:
        """The dtype that type promotion gives for these operands."""
        values = [_promotion_value(operand) for operand in operands]
        dtype = torch.result_type(values[0], values[-1])
        for value in values[1:-1]:
            dtype = torch.result_type(value, torch.empty((1,), dtype=dtype, device="meta"))
        return dtype

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``node`` in another dtype."""
        return node if node.meta["spec"].dtype == dtype else self.call(aten._to_copy.default, node, dtype=dtype)

    def operand(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor or host number in ``dtype``; a constant number stays a number."""
        return (
            self.tensor(value, dtype)
            if isinstance(value, (fx.Node, HostNumber)) and not _is_constant(value)
            else _number(value)
        )

    def tensor(self, value: Any, dtype: torch.dtype) -> fx.Node:
        """A tensor in ``dtype``: the given one, or a 0-d one of the number."""
        if isinstance(value, fx.Node):
            return self.cast(value, dtype)
        number = _number(value)
        if isinstance(number, fx.Node) and number.target is ITEM and self._is_on_device(number.args[0]):
            return self._without_reading(number.args[0], dtype)
        return self._scalar(number, dtype)

    def finish(self, node: fx.Node) -> fx.Node:
        """``node`` in the dtype and with the strides of the operation that is replaced."""
        node = self.cast(node, self.spec.dtype)
        if _same_strides(node.meta["spec"], self.spec):
            return node
        order = _dims_by_stride(self.spec)
        node = self.call(aten.permute.default, node, order)
        node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, node, _inverse(order))

    def full(self, value: Any) -> fx.Node:
        """A new tensor of this node's spec, every element the number."""
        scalar, order = self.tensor(value, self.spec.dtype), _dims_by_stride(self.spec)
        if not order and not reaches_output(self.node):
            return scalar  # its memory is overwritten by a replay, and it is not returned
        node = self.call(aten.expand.default, scalar, [self.spec.shape[dim] for dim in order])
        node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.finish(node if order == sorted(order) else self.call(aten.permute.default, node, _inverse(order)))

    def _is_on_device(self, node: Any) -> bool:
        spec = node.meta.get("spec")
        return isinstance(spec, TensorSpec) and spec.device == self.device and spec.device.type != "cpu"

    def _without_reading(self, tensor: Any, dtype: torch.dtype) -> fx.Node:
        """The device tensor of which the host would read the number only to send it back."""
        if tensor.meta["spec"].shape != ():
            tensor = self.call(aten.view.default, tensor, [])
        return self.cast(tensor, dtype)


def _is_constant(value: Any) -> bool:
    return isinstance(value, HostNumber) and not isinstance(value.value, fx.Node)


def _number(value: Any) -> Any:
    return value.value if isinstance(value, HostNumber) else value


def _meta_tensor(spec: Any) -> Any:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")


def _promotion_value(operand: Any) -> Any:
    if isinstance(operand, fx.Node):
        return _meta_tensor(operand.meta["spec"])
    return operand.promotes_as if isinstance(operand, HostNumber) else operand


def _same_strides(a: TensorSpec, b: TensorSpec) -> bool:
    if 0 in b.shape:
        return True
    return all(x == y for x, y, size in zip(a.stride, b.stride, b.shape, strict=True) if size != 1)


def _dims_by_stride(spec: TensorSpec) -> list[int]:
    return sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim])


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]


def reaches_output(node: fx.Node) -> bool:
    """Whether a node, or a view of it, is returned."""
    for user in node.users:
        if user.op == "output":
            return True
        schema = getattr(user.target, "_schema", None)
        if schema is not None and any(result.alias_info for result in schema.returns) and reaches_output(user):
            return True
    return False
