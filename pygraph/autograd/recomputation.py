"""Recomputation: which values a backward computes again instead of having its forward save them."""

# torch has no public names for operator overloads and their schemas. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from pygraph.autograd.joint_graph import JointGraph
from pygraph.ir.descriptors import TensorSpec, tensor_specs
from pygraph.ir.effects import is_random, is_view

# What attention returns for its backward if it drops: the state of the generator. Checked with torch 2.11 and 2.13.
_GENERATOR_STATES = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})


def is_recomputed(joint: JointGraph, node: fx.Node) -> bool:
    """Whether the backward computes a value of the forward again: views, constants and numbers cost next to nothing."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or node in joint.backward_nodes:
        return False
    if is_view(node) or is_unset_generator_state(node) or node.target is torch.ops.aten._local_scalar_dense.default:
        return True  # of a number that is read from the device, its tensor is saved
    return not any(map(_has_tensors, node.all_input_nodes)) and not is_random(node)


def _has_tensors(node: fx.Node) -> bool:
    """Whether a value is, or has, a tensor; also one whose shape only a run knows."""
    spec = node.meta.get("spec")
    return spec is None or any(True for _ in tensor_specs(spec))


def is_unset_generator_state(node: fx.Node) -> bool:
    """Whether a node is a generator's state that an operation returns without having drawn: uninitialized memory."""
    if node.target is not operator.getitem:
        return False
    source: Any = node.args[0]
    target: Any = source.target
    if not isinstance(target, torch._ops.OpOverload) or is_random(source):
        return False
    returns: list[Any] = target._schema.returns
    if len(returns) == 1:  # a list of tensors
        return False
    return returns[node.args[1]].name in _GENERATOR_STATES  # pyright: ignore


def zeros_for_generator_state(node: fx.Node, graph: fx.Graph) -> fx.Node | None:
    """Add zeros to a graph in place of an unset generator state, which no kernel reads; None for any other node."""
    spec = node.meta.get("spec")
    if not is_unset_generator_state(node) or not isinstance(spec, TensorSpec):
        return None
    settings: Any = {"dtype": spec.dtype, "device": spec.device}
    return graph.call_function(torch.ops.aten.zeros.default, (list(spec.shape),), settings)
