"""Copies around branches and loops: what their parts read and write has the same address at every replay.

The pointers of nodes change from call to call, but for those of nodes in the parts of a branch or a loop. So a tensor
that comes from outside of the region is copied before, and a result that goes outside is copied behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from pygraph.ir.control_flow import is_conditional, without_repetition
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import is_store, root

aten = torch.ops.aten


def copy_around_conditionals(graph: fx.Graph, recordable: Collection[int], fixed: Collection[fx.Node]) -> None:
    """Insert the copies.

    Args:
        graph: The graph, whose nodes have their regions.
        recordable: The regions that are recorded as graphs.
        fixed: The placeholders of tensors that stay where they are.
    """
    for node in list(graph.nodes):
        if is_conditional(node) and node.meta.get("region") in recordable:
            _copy_before(graph, node, fixed)
            _copy_behind(graph, node)


def _copy_before(graph: fx.Graph, node: fx.Node, fixed: Collection[fx.Node]) -> None:
    copies: dict[fx.Node, fx.Node] = {}

    def local(argument: fx.Node) -> fx.Node:
        origin = root(argument)
        inside = origin.op == "call_function" and origin.meta.get("region") == node.meta["region"] and _is_made(origin)
        if argument.op == "get_attr" or origin in fixed or inside:
            return argument
        if argument not in copies:
            with graph.inserting_before(node):
                copies[argument] = _copy(graph, argument, node)
        return copies[argument]

    node.args = fx.node.map_arg(node.args, local)  # pyright: ignore


def _is_made(origin: fx.Node) -> bool:
    """Whether a node makes the memory of its value, and does not read it from a pointer slot."""
    return origin.target is not torch.ops.pygraph.load.default


def _copy_behind(graph: fx.Graph, node: fx.Node) -> None:
    for result in list(node.users):
        outside = [user for user in result.users if _is_outside(user, node.meta["region"])]
        if not outside:
            continue
        with graph.inserting_after(result):
            copied = _copy(graph, result, node)
        for user in outside:
            user.replace_input_with(result, copied)


def _is_outside(user: fx.Node, region: Any) -> bool:
    return user.op == "output" or is_store(user) or user.meta.get("region") != region


def _copy(graph: fx.Graph, value: fx.Node, of: fx.Node) -> fx.Node:
    """Add nodes that copy a tensor, in the layout that it has."""
    spec: TensorSpec = value.meta["spec"]
    once = without_repetition(spec)
    meta = {key: of.meta[key] for key in _OF_SOURCE if key in of.meta}

    def add(target: Any, args: tuple[Any, ...], found: TensorSpec, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta = {**meta, "spec": dataclasses.replace(found, offset=0)}
        return node

    if once != spec:
        value = add(aten.as_strided.default, (value, list(once.shape), list(once.stride)), once)
    if once.has_gaps:
        how = {"dtype": once.dtype, "device": once.device}
        copied = add(aten.empty_strided.default, (list(once.shape), list(once.stride)), once, **how)
        with graph.inserting_after(copied):
            add(aten.copy_.default, (copied, value), once)
    else:
        copied = add(aten.clone.default, (value,), once)
    if once == spec:
        return copied
    with graph.inserting_after(copied):
        return add(aten.as_strided.default, (copied, list(spec.shape), list(spec.stride)), spec)


_OF_SOURCE = ("source", "backward_of", "scopes", "region")
