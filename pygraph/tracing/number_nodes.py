"""Floats that a trace computes from numbers: each is a symbol of its own, and a node of the graph computes it.

Torch's tracer computes with the algebra of real numbers: to it, ``v - v`` is 0, ``v == v`` is true, and
``(k + 1e16) - 1e16`` is ``k``. To Python they are not, where a value is NaN or infinite, or is rounded. So nothing is
known of a result but which operation gives it of which numbers. A run does this operation, in Python.
"""

# The tracer works on torch's private parts. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_meta, set_proxy_slot
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._thunk import Thunk


def number_node(function: Callable[..., Any], operands: Sequence[Any], kind: type, value: float | None) -> Any:
    """A new symbol for the result of an operation, with a node that computes it.

    Args:
        function: The operation, which runs of Python numbers too.
        operands: Symbols and constants.
        kind: ``float`` or ``bool``.
        value: The result in this call, where all symbols stand for numbers of the host; None where only a run knows it.

    Returns:
        The symbol, the same one for the same operation of the same operands; None where the graph under way does not
        have the operands, as in a branch of control flow.
    """
    tracer = _tracer()
    nodes = None if tracer is None else _nodes_of(operands, tracer)
    if nodes is None:
        return None
    made: dict[Any, Any] = vars(tracer).setdefault(_MADE, {})
    key = (function, *map(_key_of, operands))
    if key not in made:
        shapes = next(operand.node.shape_env for operand in operands if _is_symbol(operand))
        made[key] = _symbol_for_device(shapes, kind) if value is None else _symbol_for_host(shapes, value)
        _compute(tracer, function, nodes, made[key])
    return made[key]


def number_again(node: fx.Node, operands: Sequence[Any]) -> Any:
    """The symbol of a node of a graph that is traced again; None if it is none of `number_node`.

    Args:
        node: The node.
        operands: What it is computed from.
    """
    symbol: Any = node.meta.get("val")
    tracer = _tracer()
    if tracer is None or not _is_symbol(symbol) or isinstance(node.target, torch._ops.OpOverload) or node.kwargs:
        return None
    expression = symbol.node._expr
    is_own = expression.is_Symbol if isinstance(symbol, torch.SymFloat) else isinstance(symbol, torch.SymBool)
    nodes = _nodes_of(operands, tracer) if is_own else None
    if nodes is None:
        return None
    _compute(tracer, node.target, nodes, symbol)
    return symbol


def _compute(tracer: Any, function: Any, operands: tuple[Any, ...], symbol: Any) -> None:
    """Have a node compute a symbol."""
    proxy = fx.Proxy(tracer.create_node("call_function", function, operands, {}), tracer)
    set_meta(proxy, symbol)
    set_proxy_slot(symbol, tracer, Thunk(lambda: proxy))


_counted = itertools.count()  # by which torch tells sources

_MADE = "_pygraph_number_nodes"  # the attribute of a tracer that holds the symbols, by operation and operands


def _tracer() -> Any:
    """The tracer of the trace under way; None if there is none."""
    mode: Any = get_proxy_mode()
    return None if mode is None else mode.tracer


def _is_symbol(value: object) -> bool:
    return issubclass(type(value), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _key_of(operand: Any) -> Any:
    """An operand in a key; ``0.0`` is not ``-0.0``, and ``2`` not ``2.0``."""
    return operand.node if _is_symbol(operand) else (type(operand), repr(operand))


def _nodes_of(operands: Sequence[Any], tracer: Any) -> tuple[Any, ...] | None:
    """The operands of a node; None where the graph under way has no node for one of them."""
    found: list[Any] = []
    for operand in operands:
        thunk: Any = get_proxy_slot(operand, tracer, None) if _is_symbol(operand) else operand
        if thunk is None:
            return None
        found.append(thunk.force().node if _is_symbol(operand) else operand)
    return tuple(found)


def _symbol_for_device(shapes: Any, kind: type) -> Any:
    with shapes.ignore_fresh_unbacked_symbols():  # which torch expects to find in results of operations
        return shapes.create_unbacked_symfloat() if kind is float else shapes.create_unbacked_symbool()


def _symbol_for_host(shapes: Any, value: float) -> Any:
    from torch._dynamo.source import ConstantSource  # checked with torch 2.11 and 2.13

    source = ConstantSource(f"computed {next(_counted)}")
    symbol = shapes.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symfloatnode(symbol, hint=value, source=source)
