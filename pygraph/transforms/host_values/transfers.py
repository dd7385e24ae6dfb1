"""Locations of the values of nodes, on the host or on the device, and the nodes that move them between both."""

# torch has no public names for operator overloads. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import TensorSpec, tensor_specs
from pygraph.ir.effects import is_host_number
from pygraph.transforms.rules.emitter import SCALAR, aten

_Operation = torch._ops.OpOverload
_HigherOrder = torch._ops.HigherOrderOperator

TO_COPY: Any = aten._to_copy.default
_DEVICE_PUT: Any = torch.ops.prims.device_put.default


def on_device(node: fx.Node) -> bool:
    """Whether a node's value, or a part of it, is on the device."""
    return any(spec.device.type not in ("cpu", "meta") for spec in tensor_specs(node.meta.get("spec")))


def reads_device(node: fx.Node) -> bool:
    """Whether a node takes a value that is on the device."""
    return any(on_device(source) for source in node.all_input_nodes)


def is_number(value: Any) -> bool:
    """Whether an argument is a node whose value is a Python number."""
    return isinstance(value, fx.Node) and is_host_number(value)


def is_host_tensor(value: Any) -> bool:
    """Whether an argument is a node whose value is a tensor on the host."""
    spec = value.meta.get("spec") if isinstance(value, fx.Node) else None
    return isinstance(spec, TensorSpec) and spec.device.type == "cpu"


def is_real_scalar(spec: TensorSpec) -> bool:
    """Whether a tensor is 0-d and not complex, so that it can be sent as a number."""
    return spec.shape == () and not spec.dtype.is_complex


def is_upload(node: fx.Node) -> bool:
    """Whether a node brings a host value to the device."""
    if node.target is SCALAR:
        return on_device(node)
    return node.target is TO_COPY and on_device(node) and is_host_tensor(node.args[0])


def write_uploads_alike(graph: fx.Graph) -> None:
    """Write ``device_put``, which decompositions make of copies to the device, as ``_to_copy``, as traces do."""
    for node in graph.find_nodes(op="call_function", target=_DEVICE_PUT):
        if on_device(node) and is_host_tensor(node.args[0]):
            node.target, node.args, node.kwargs = TO_COPY, node.args[:1], {"device": node.meta["spec"].device}


def is_download(node: fx.Node) -> bool:
    """Whether a node brings a device value to the host."""
    return reads_device(node) and not on_device(node) and node.meta.get("spec") is not None


def is_device_operation(node: fx.Node) -> bool:
    """Whether a node is an operation that the device runs, and no transfer."""
    if node.op != "call_function" or not isinstance(node.target, (_Operation, _HigherOrder)):
        return False
    return (on_device(node) or reads_device(node)) and not is_upload(node) and not is_download(node)
