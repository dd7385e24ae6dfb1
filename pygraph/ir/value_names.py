"""Names of values: equal in two Programs only for nodes that compute the same from the same inputs.

Programs of one function that differ in a decision have equal names up to there. They are noted when a Program is
traced, and passes hand them on with the metadata of its nodes. What is drawn at random has a name as well, which stands
for all draws before it too: after them, random generators are in the same states in both.
"""

# Arguments of nodes are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

from torch import fx

from pygraph.ir.argument_keys import arguments_key
from pygraph.ir.decisions import decisions_among, is_question
from pygraph.ir.descriptors import Argument, Captured, Element, Input, ScalarArgument, TensorSpec
from pygraph.ir.effects import (
    has_effect,
    is_operation,
    is_random,
    is_selection,
    is_view,
    written_arguments,
)
from pygraph.ir.program import Program


def value_name(node: fx.Node) -> str | None:
    """The name of a node's value; None if it has none."""
    return node.meta.get("value_name")


def with_value_names(program: Program, needed: Collection[str]) -> Program:
    """A Program that decides by values on the device, with names of its values.

    Args:
        program: A Program at stage ``aten``.
        needed: The names of tensors that others go on with where this one decides otherwise. They are computed before
            the next question; what questions have taken otherwise is dropped.

    Returns:
        The same Program if it asks for nothing.
    """
    if not decisions_among(program.nodes):
        return program
    module = program.copy_graph()
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, described in zip(placeholders, program.inputs, strict=True):
        node.meta["value_name"] = _name_of_input(described)
    waiting: list[fx.Node] = []
    draws = _Draws()
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["value_name"] = name = draws.name(node) if is_random(node) else _name_of_result(node)
            if is_question(node):
                node.args = (*node.args[:3], waiting) if waiting else node.args[:3]
                waiting = []
            elif name in needed and isinstance(node.meta.get("spec"), TensorSpec):
                waiting.append(node)
    graph.eliminate_dead_code(is_impure_node=has_effect)
    module.recompile()
    return program.replace(module=module)


def _name_of_input(described: Input) -> str | None:
    if isinstance(described, Captured):
        return _digest("captured", id(described.value))
    if isinstance(described, Element):
        of = described.of
        return _digest("element", id(of.value) if isinstance(of, Captured) else of.path, described.type)
    if isinstance(described, (Argument, ScalarArgument)):
        return _digest(type(described).__name__, described.path)
    return None


class _Draws:
    """The draws of a Program so far."""

    def __init__(self) -> None:
        self._last: str | None = "none"

    def name(self, node: fx.Node) -> str | None:
        """The name of what a node draws; None if it has none, or a draw before it has none."""
        self._last = None if self._last is None else _name_of_result(node, self._last)
        return self._last


def _name_of_result(node: fx.Node, *before: str) -> str | None:
    """The name of a result, which stands for all that it is computed from, and for what has come before it."""
    is_known = (is_operation(node) and not written_arguments(node)) or is_selection(node)
    if not (is_known or is_view(node)) or is_question(node):
        return None
    parts = arguments_key(node, value_name)
    return None if parts is None else _digest(str(node.target), *parts, *before)


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
