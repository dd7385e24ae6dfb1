"""Leaves of the arguments whose values a finished trace depends on, so that they are baked in."""

# Symbols have no types.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import sympy  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from pygraph.ir.descriptors import Argument, Baked, ScalarArgument
from pygraph.tracing.fake_arguments import FakeArguments
from pygraph.tracing.number_conditions import Comparison, comparison_in, guard_text, number_text
from pygraph.tracing.positions import bounds_of, is_outside, position_symbols, symbols_of_layouts, unknown_bounds

aten = torch.ops.aten


def comparisons(arguments: FakeArguments) -> list[Comparison]:
    """The comparisons of live numbers by which the function has decided, as far as calls can make them."""
    return [comparison_in(text, arguments.paths) for text in arguments.uses.comparisons()]


def note_guards(arguments: FakeArguments, module: fx.GraphModule) -> None:
    """Note the comparisons of live numbers that torch has made, and what operations rely on, as some of the function.

    Args:
        arguments: The arguments.
        module: The graph.
    """
    uses, found = arguments.uses, dict[str, frozenset[int]]()
    for guard in arguments.shapes.guards:
        text = guard_text(guard.expr, uses.names)
        if text is not None:
            found[f"({text})"] = uses.leaves_of(guard.expr.free_symbols)
    for position, *ends in filter(None, map(bounds_of, module.graph.nodes)):
        # What is viewed may have a size that depends on a number, too.
        first, last = (sympy.Integer(end) if isinstance(end, int) else end.node.expr for end in ends)
        texts = [number_text(expression, uses.names) for expression in (first, position, last)]
        if None not in texts:
            symbols = first.free_symbols | position.free_symbols | last.free_symbols
            found[f"({' <= '.join(map(str, texts))})"] = uses.leaves_of(symbols)
    by_leaves: dict[frozenset[int], list[str]] = {}
    for text, leaves in found.items():
        by_leaves.setdefault(leaves, []).append(text)
    for leaves, texts in by_leaves.items():
        uses.note_guard(" and ".join(sorted(texts)), leaves)
    uses.join_relied_on()


def needed_numbers(
    arguments: FakeArguments, module: fx.GraphModule, taken: Collection[Comparison] = ()
) -> frozenset[int]:
    """The leaves of live numbers whose values the trace needs: the next one has to bake them in.

    Args:
        arguments: The arguments.
        module: The graph.
        taken: Comparisons whose outcomes are arguments themselves.
    """
    texts = {use.text for use in arguments.uses.missing if comparison_in(use.text, arguments.paths) in taken}
    return arguments.uses.of_symbols | arguments.uses.asked | arguments.uses.needed(texts)


def numbers_of_symbols(arguments: FakeArguments, module: fx.GraphModule, results: Sequence[Any]) -> frozenset[int]:
    """The leaves of live numbers whose values the trace needs, besides those that the function asks for.

    Args:
        arguments: The arguments.
        module: The graph.
        results: The values that the function returns.
    """
    guarded = _guarded_numbers(arguments, module, results)
    return guarded | _exponents(arguments, module) | _numbers_computed_by_numpy(arguments, module)


def live_positions(arguments: FakeArguments, module: fx.GraphModule) -> frozenset[int]:
    """The leaves of live numbers that positions of views are made of."""
    found = [expression for expression, *_ in filter(None, map(bounds_of, module.graph.nodes))]
    return arguments.uses.leaves_of(symbol for one in found for symbol in one.free_symbols)


def baked_leaves(arguments: FakeArguments) -> tuple[Baked, ...]:
    """The leaves that are no inputs."""
    live = {entry.leaf for entry in arguments.inputs if isinstance(entry, (Argument, ScalarArgument))}
    paths, static = arguments.paths, arguments.static
    leaves = enumerate(arguments.leaves)
    return tuple(Baked(paths[index], index, leaf, index in static) for index, leaf in leaves if index not in live)


def _guarded_numbers(arguments: FakeArguments, module: fx.GraphModule, results: Sequence[Any]) -> frozenset[int]:
    """The numbers that a guard is about which no call can check, or that are part of a shape."""
    needed: set[Any] = set()
    known: set[Any] = set()
    for guard in arguments.shapes.guards:
        if guard_text(guard.expr, arguments.uses.names) is not None:
            known |= guard.expr.free_symbols
        else:
            needed |= guard.expr.free_symbols
    needed |= set(arguments.shapes.replacements) - known
    for expression, *_ in filter(None, map(bounds_of, module.graph.nodes)):
        if number_text(expression, arguments.uses.names) is None:
            needed |= expression.free_symbols
    # Where torch does not say so itself (torch 2.11), eager's error is raised when the position is a number.
    needed |= {symbol for node in module.graph.nodes if is_outside(node) for symbol in position_symbols(node)}
    needed |= symbols_of_layouts(module.graph.nodes, results) | unknown_bounds(module.graph.nodes)
    return arguments.uses.leaves_of(needed)


_POWERS = (aten.pow.Tensor_Scalar, aten._foreach_pow.Scalar, aten._foreach_pow.ScalarList)
"""Operations that do otherwise for some exponents: for 0.5, torch computes a root."""


def _exponents(arguments: FakeArguments, module: fx.GraphModule) -> frozenset[int]:
    """The numbers that the exponents of powers are made of."""
    nodes = (node for node in module.graph.nodes if node.op == "call_function" and node.target in _POWERS)
    exponents = (one for node in nodes for one in pytree.tree_leaves(node.args[1]) if isinstance(one, fx.Node))
    return arguments.uses.leaves_of(symbol for one in exponents for symbol in free_symbols(one.meta["val"]))


def _numbers_computed_by_numpy(arguments: FakeArguments, module: fx.GraphModule) -> set[int]:
    """The NumPy numbers that are computed with on the host, in NumPy's types, which symbols know nothing of."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return {
        descriptor.leaf
        for node, descriptor in zip(placeholders, arguments.inputs, strict=False)
        if isinstance(descriptor, ScalarArgument)
        and isinstance(arguments.leaves[descriptor.leaf], np.generic)
        and any(u.op == "call_function" and not isinstance(u.target, torch._ops.OpOverload) for u in node.users)
    }
