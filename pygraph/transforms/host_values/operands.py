"""Operands of device operations: host numbers and host tensors among them become device tensors."""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from pygraph.ir.descriptors import Fallback, TensorSpec
from pygraph.ir.scopes import came_from
from pygraph.transforms.host_values.transfers import is_host_tensor, is_number, is_real_scalar
from pygraph.transforms.host_values.uploads import Uploads
from pygraph.transforms.rules.emitter import Emitter, HostNumber, aten
from pygraph.transforms.rules.foreach_rules import ONE_KERNEL, PER_ENTRY, one_dtype
from pygraph.transforms.rules.scalar_rules import RULES

_INDEXING: frozenset[Any] = frozenset(
    {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default}
)
_COPIES: frozenset[Any] = frozenset({aten.copy.default, aten.slice_scatter.default, aten.select_scatter.default})
"""Operations that read host tensors of any shape on the device, as those of `_INDEXING` do, so that they are uploaded
before."""

_TAKE_HOST_TENSORS = ("attention", "rnn", "lstm", "gru", "padded_sequence")
"""Parts of the names of operations that take some of their tensors on the host."""


def replace_host_operands(node: fx.Node, uploads: Uploads) -> list[Fallback]:
    """Replace host values among the operands of a device operation by device tensors.

    Args:
        node: The operation. It is erased if its rule makes others of it.
        uploads: The graph that is edited, and the device tensors for host values.

    Returns:
        A fallback for every host value that the operation still takes.
    """
    if not any(is_number(source) or is_host_tensor(source) for source in node.all_input_nodes):
        return []
    uploads.edit.origin = came_from(node)
    if node.target in RULES and isinstance(node.meta.get("spec"), TensorSpec):
        if _apply_rule(node, uploads):
            return []
    elif node.target in PER_ENTRY and _apply_rule_to_lists(node, uploads):
        return []
    target: Any = node.target
    name = str(target)
    fallbacks = _upload_tensors(node, uploads) if isinstance(target, torch._ops.OpOverload) else []
    fallbacks += [
        Fallback(name, f"takes {_name(source)} by value", node.meta.get("source"))
        for source in node.all_input_nodes
        if is_number(source)
    ]
    return fallbacks


def _name(source: fx.Node) -> str:
    """A number of the host, as a report calls it."""
    if source.target is aten._local_scalar_dense.default:
        return "a number that is read from the device"
    return f"the host value {source.name}"


def _apply_rule(node: fx.Node, uploads: Uploads) -> bool:
    """Replace an operation by the nodes of its rule; False where the rule does not apply."""
    args: dict[str, Any] = {}
    for argument, value in _arguments(node):
        scalar = str(argument.type) in ("number", "Tensor", "Optional[number]", "Optional[Tensor]")
        args[argument.name] = _operand(value, uploads) if scalar else value
    new = RULES[node.target](_emitter(node, node.meta["spec"], uploads), args) if _fit_rules(args) else None
    if new is None:
        return False
    node.replace_all_uses_with(new)
    uploads.edit.graph.erase_node(node)
    return True


def _apply_rule_to_lists(node: fx.Node, uploads: Uploads) -> bool:
    """Take host numbers out of the operands of an operation on lists of tensors; False where that fails."""
    specs: Any = node.meta["spec"]
    values = [value for _, value in _arguments(node)]
    target: Any = ONE_KERNEL.get(node.target)
    dtype = one_dtype(specs)
    if target is not None and dtype is not None:
        node.target, node.args = target, (values[0], uploads.scalar(values[1], dtype))
        return True
    rule, defaults, names = PER_ENTRY[node.target]
    entries: list[fx.Node] = []
    for index, spec in enumerate(specs):
        given = [_operand(_entry(value, index), uploads) for value in values]
        args = {**defaults, **dict(zip(names, given, strict=False))}
        entry = rule(_emitter(node, spec, uploads), args) if _fit_rules(args) else None
        if entry is None:
            return False
        entries.append(entry)
    for user in list(node.users):
        user.replace_all_uses_with(entries[user.args[1]])  # pyright: ignore  # operator.getitem(node, index)
        uploads.edit.graph.erase_node(user)
    uploads.edit.graph.erase_node(node)
    return True


def _upload_tensors(node: fx.Node, uploads: Uploads) -> list[Fallback]:
    """Replace host tensors among the operands of an operation by uploaded ones; a fallback for each that cannot be."""
    target: Any = node.target
    fallbacks: list[Fallback] = []
    if any(word in target._opname for word in _TAKE_HOST_TENSORS):
        return fallbacks
    for source in node.all_input_nodes:
        if is_host_tensor(source):
            if source.meta["spec"].shape == () or target in _INDEXING or target in _COPIES:
                node.replace_input_with(source, uploads.tensor(source))
            else:
                reason = f"reads the host tensor {source.name}"
                fallbacks.append(Fallback(str(target), reason, node.meta.get("source")))
    return fallbacks


def _emitter(node: fx.Node, spec: TensorSpec, uploads: Uploads) -> Emitter:
    return Emitter(uploads.edit.graph, node, uploads.edit.device, spec, uploads.scalar)


def _operand(value: Any, uploads: Uploads) -> Any:
    """A number or a 0-d tensor on the host as a `HostNumber`; another value as it is."""
    if is_number(value):
        return HostNumber(value, value.meta["spec"](1))
    if is_host_tensor(value) and is_real_scalar(value.meta["spec"]):
        return HostNumber(uploads.number(value), torch.empty((), dtype=value.meta["spec"].dtype, device="meta"))
    return value


def _arguments(node: fx.Node) -> list[tuple[Any, Any]]:
    """The arguments of an operation as its schema has them, each with its value."""
    target: Any = node.target
    return [
        (argument, node.args[position])
        if position < len(node.args) and not argument.kwarg_only
        else (argument, node.kwargs.get(argument.name, argument.default_value))
        for position, argument in enumerate(target._schema.arguments)
    ]


def _entry(value: Any, index: int) -> Any:
    """The entry of a list, or the value itself, which an operation on lists takes for all entries."""
    items: Any = value
    return items[index] if isinstance(value, (list, tuple)) else items


def _fit_rules(args: dict[str, Any]) -> bool:
    """Whether no host value is left where a rule expects none, nor a tensor of which only a run knows how it lies."""
    items = [item for value in args.values() for item in _flat(value)]
    unknown = any(isinstance(item, fx.Node) and item.meta.get("spec") is None for item in items)
    return not unknown and not any(is_number(item) or is_host_tensor(item) for item in items)


def _flat(value: Any) -> Iterable[Any]:
    items: Any = value
    return items if isinstance(value, (list, tuple)) else (value,)
