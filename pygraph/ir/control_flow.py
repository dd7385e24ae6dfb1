"""Branches and loops by values of the device, ``torch.cond`` and ``while_loop``, whose parts are graphs of their own.

A CUDA graph has nodes for both, if each part is work that the device does by itself. Everything else is a reason for
which such an operation runs between graphs, where the host reads its predicate, as in eager.
"""

# Torch's higher-order operations, and the graphs of their parts, are not typed. Checked with torch 2.11 and 2.13.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import host_reason, is_operation, is_random, is_selection, is_written
from pygraph.ir.interpreter import Interpreter

_COND, _WHILE = torch.ops.higher_order.cond, torch.ops.higher_order.while_loop
_OTHERWISE = "it is control flow or host code"


def is_conditional(node: fx.Node) -> bool:
    """Whether the node is a branch or a loop by a value."""
    return node.op == "call_function" and node.target in (_COND, _WHILE)


def is_loop(node: fx.Node) -> bool:
    """Whether the node is a loop by a value."""
    return node.target is _WHILE


def parts_of(node: fx.Node) -> list[fx.GraphModule]:
    """The parts of a branch, for either predicate; a loop's predicate, and its turn."""
    found = [_constant(node, argument) for argument in (node.args[:2] if is_loop(node) else node.args[1:3])]
    return [one for one in found if isinstance(one, fx.GraphModule)]


def _constant(node: fx.Node, argument: Any) -> Any:
    of_graph = isinstance(argument, fx.Node) and argument.op == "get_attr"
    return getattr(node.graph.owning_module, str(argument.target), None) if of_graph else argument


def reason_outside(node: fx.Node) -> str | None:
    """The reason for which a node cannot be recorded in a graph; None if it can.

    Args:
        node: A node of a Program.
    """
    return _reason(node) if is_conditional(node) else host_reason(node)


def _reason(node: fx.Node) -> str | None:
    specs: Any = node.meta.get("spec")
    described = [_described_operand(operand) for operand in operands_of(node, node.args)]
    parts, tensors = parts_of(node), [one for one in described if isinstance(one, TensorSpec)]
    if not isinstance(specs, tuple) or not all(isinstance(spec, TensorSpec) for spec in specs):
        return f"{_OTHERWISE}: what it gives has no layout that is known"
    if None in described or len(parts) != 2:
        return f"{_OTHERWISE}: it takes something besides tensors and constants"
    if any(spec.overlaps_itself for spec in (*specs, *map(without_repetition, tensors))):
        return f"{_OTHERWISE}: a tensor that it takes or gives has several elements in one place"
    devices = {spec.device for spec in (*specs, *tensors)}
    if len(devices) != 1 or next(iter(devices)).type == "cpu":
        return f"{_OTHERWISE}: its tensors are not all on the device"
    if is_loop(node):
        return _reason_of_loop(parts, described, specs)
    predicate: Any = node.args[0]
    if not isinstance(predicate, fx.Node) or not _is_predicate(predicate.meta.get("spec"), specs[0].device):
        return f"{_OTHERWISE}: its predicate is no bool on the device"
    return next(filter(None, (_reason_of_part(part, described, specs) for part in parts)), None)


def _described_operand(operand: Any) -> Any:
    """The spec of a tensor, or a constant; None for what is neither."""
    if isinstance(operand, fx.Node):
        spec = operand.meta.get("spec")
        return spec if isinstance(spec, TensorSpec) else None
    return operand if type(operand) in (int, float, bool) else None


def operands_of(node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    """The operands of the parts among the arguments of a node, or their values; a loop's begin with what it carries."""
    return pytree.tree_leaves(list(args[2:] if is_loop(node) else args[3:]))


def _reason_of_loop(
    parts: Sequence[fx.GraphModule], described: Sequence[Any], specs: Sequence[TensorSpec]
) -> str | None:
    carried = described[: len(specs)]
    if [_without_offset(spec) for spec in carried] != [_without_offset(spec) for spec in specs]:
        return f"{_OTHERWISE}: what it carries changes its layout"
    starts = [*map(_without_offset, specs), *described[len(specs) :]]
    reason = _reason_of_part(parts[1], starts, specs)
    if reason is not None:
        return reason
    found = _described(parts[0], starts)
    if isinstance(found, str) or len(found) != 1 or not _is_predicate(found[0], specs[0].device):
        return found if isinstance(found, str) else f"{_OTHERWISE}: its predicate is no bool on the device"
    return None


def _reason_of_part(part: fx.GraphModule, described: Sequence[TensorSpec], specs: Sequence[TensorSpec]) -> str | None:
    found = _described(part, described)
    if isinstance(found, str):
        return found
    if [_without_offset(spec) for spec in found] != [_without_offset(spec) for spec in specs]:
        return f"{_OTHERWISE}: its parts give results of different layouts"
    return None


def _is_predicate(spec: Any, device: torch.device) -> bool:
    return isinstance(spec, TensorSpec) and spec.dtype == torch.bool and spec.shape == () and spec.device == device


def without_repetition(spec: TensorSpec) -> TensorSpec:
    """The elements of a tensor once each, where it is expanded."""
    sizes = zip(spec.shape, spec.stride, strict=True)
    return dataclasses.replace(spec, shape=tuple(min(size, 1) if stride == 0 else size for size, stride in sizes))


def _without_offset(spec: Any) -> Any:
    if not isinstance(spec, TensorSpec):
        return spec
    return dataclasses.replace(spec, offset=0)


def _described(part: fx.GraphModule, operands: Sequence[Any]) -> list[Any] | str:
    """The results of a part, whose nodes are described; the reason if the device does not do its work by itself."""
    description = _Description(part)
    with FakeTensorMode(shape_env=ShapeEnv()):  # which loops inside ask for
        inputs = [spec.empty() if isinstance(spec, TensorSpec) else spec for spec in operands]
        try:
            description.run(*inputs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            return f"{_OTHERWISE}: a part of it cannot be described ({str(error).splitlines()[0][:80]})"
    if description.reason is not None:
        return f"{_OTHERWISE}: of a part, {description.reason}"
    output: Any = part.graph.output_node()
    return [one.meta.get("spec") if isinstance(one, fx.Node) else one for one in pytree.tree_leaves(output.args[0])]


class _Description(Interpreter):
    """Runs a part on fake tensors, and gives each of its nodes a spec.

    Attributes:
        reason: Why the part is not work that the device does by itself; None if it is.
    """

    def __init__(self, part: fx.GraphModule) -> None:
        super().__init__(part)
        self.reason: str | None = None

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        if n.op == "get_attr" and not isinstance(getattr(self.module, str(n.target)), fx.GraphModule):
            self.reason = self.reason or "it reads a constant"
        value = super().run_node(n)
        n.meta["spec"] = pytree.tree_map_only(torch.Tensor, TensorSpec.of, value)
        if isinstance(n.meta["spec"], list):
            n.meta["spec"] = tuple(n.meta["spec"])
        if n.op == "call_function":
            self.reason = self.reason or _reason_of_node(n)
        return value


def _reason_of_node(node: fx.Node) -> str | None:
    if is_selection(node):
        return None
    if is_conditional(node):
        return _reason(node)
    if not is_operation(node) or node.target.namespace not in ("aten", "prims"):  # pyright: ignore
        return "it runs code that is not known"
    if is_written(node):
        return "it updates a tensor"
    return "it draws random numbers" if is_random(node) else host_reason(node)
