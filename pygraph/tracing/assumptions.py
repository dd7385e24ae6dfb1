"""Assumptions of a trace on numbers that only a run knows, written into its graph as assertions.

Where code checks a number that was read from a tensor (``torch._check(k < 3)``, ``x.narrow(0, k, 1)``), torch notes the
check and goes on. Eager raises an error if it does not hold, and so must a run. What an operation has checked it checks
again by itself when it is run.
"""

# The tracer works on torch's private parts, and on symbols, of which torch says nothing. Checked with torch 2.11, 2.13.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import sympy  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from pygraph.ir.decisions import is_question
from pygraph.ir.effects import is_view

aten = torch.ops.aten


_Maker: TypeAlias = Literal["between operations", "by one that checks", "by a view", "by one that does not"]

_VIEWS = (aten.view.default, aten.select.int)  # which need the size that they are given


class Assumptions:
    """The assumptions of one trace.

    Args:
        shapes: The environment of the symbols, which notes each assumption.
    """

    def __init__(self, shapes: ShapeEnv) -> None:
        self._shapes = shapes
        self._made: dict[int, tuple[_Maker, int]] = {}  # and how many operations there were before
        self._before: list[str] = []  # before each operation, a question since the last one, or the last node, by name
        self._last: fx.Node | None = None

    def _noted(self) -> list[Any]:
        return [noted for found in self._shapes.deferred_runtime_asserts.values() for noted in found]

    def before_operation(self, last: fx.Node | None) -> None:
        """Attribute assumptions since the last operation to the function's own code.

        Args:
            last: The last node of the graph.
        """
        if last is not None:
            self._before.append(self._question_since(last).name)
            self._last = last
        for one in self._noted():
            self._made.setdefault(id(one), ("between operations", len(self._before)))

    def _question_since(self, last: fx.Node) -> fx.Node:
        """The last question since the last operation, which stays in the graph; the last node if there is none."""
        node = last
        while node is not self._last and node.op != "root":
            if is_question(node):
                return node
            node = node.prev
        return last

    def after_operation(self, graph: fx.Graph, func: Any) -> None:
        """Attribute assumptions since then to this operation.

        When it is run, it checks them itself. A composite operation, which is recorded as its parts, does not, nor does
        a view, of which a Program has only the result.
        """
        last = next(iter(reversed(graph.nodes)), None)
        is_run = last is not None and last.target is func and not is_view(last)
        made = "by one that checks" if is_run else "by a view" if func in _VIEWS else "by one that does not"
        for one in self._noted():
            self._made.setdefault(id(one), (made, len(self._before)))

    def write(self, graph: fx.Graph) -> None:
        """Add assertions after the numbers that they are about, of which some were read from tensors.

        Each comes after what was decided before, as it may hold for that way alone.

        Args:
            graph: The graph of the recording, with symbols as values of nodes.
        """
        asserted = list(self._asserted())
        if not asserted:
            return
        numbers: dict[Any, fx.Node] = {}
        sizes: dict[Any, tuple[fx.Node, int]] = {}
        for node in graph.nodes:
            for dim, size in enumerate(_sizes_of(node)):
                if isinstance(size, torch.SymInt):
                    sizes.setdefault(size.node._expr, (node, dim))
            symbol = _symbol_of(node)
            if symbol is not None and (node.op == "placeholder" or node.target is aten._local_scalar_dense.default):
                numbers.setdefault(symbol, node)
        for symbol in set[Any]().union(*(one.free_symbols for one, of_sizes, _ in asserted if of_sizes)):
            if symbol not in numbers and symbol in sizes:
                numbers[symbol] = _size(graph, *sizes[symbol])
        order = {node: position for position, node in enumerate(graph.nodes)}
        names = {node.name: node for node in order}
        for expression, of_sizes, count in asserted:
            symbols = expression.free_symbols
            if not of_sizes and any(numbers[one].target is aten.sym_size.int for one in symbols & numbers.keys()):
                continue
            if not all(symbol.is_integer for symbol in symbols):
                continue  # torch notes such where it computes with them, as an optimizer does with its steps
            if not symbols <= numbers.keys() or all(numbers[symbol].op == "placeholder" for symbol in symbols):
                continue
            last = max((numbers[symbol] for symbol in symbols), key=lambda node: order[node])
            before = next((names[name] for name in reversed(self._before[:count]) if name in names), last)
            with graph.inserting_before(max(last, before, key=lambda node: order[node]).next):
                _assert(graph, expression, {symbol: numbers[symbol] for symbol in symbols}, last.meta.get("source"))

    def _asserted(self) -> Iterator[tuple[Any, bool, int]]:
        """The conditions to assert, whether those of sizes that data decide are, and the operations before each.

        Operations take -1 to infer a size.

        Where tensors are taken to have the same size, one of them may have the size 1 and be expanded. A view needs
        the size that it is given.
        """
        for one in self._noted():
            made, count = self._made.get(id(one), ("between operations", len(self._before)))
            of_sizes = made == "by a view" or not isinstance(one.expr, sympy.Eq)
            if made == "by one that checks":
                continue
            # Checks in C++ of operations that are not traced name a file of torch's C++ code.
            if made == "between operations" and str(one.msg).startswith(torch.__file__):
                yield one.expr, True, count  # `torch._check` of the function's own
            elif isinstance(one.expr, sympy.Eq):
                worked_out = (sympy.Eq(symbol, -1) for symbol in one.expr.free_symbols)
                yield sympy.Or(one.expr, *worked_out), of_sizes, count  # pyright: ignore[reportArgumentType]
            elif not _is_of_size(one.expr):
                yield one.expr, of_sizes, count


def _is_of_size(expression: Any) -> bool:
    """Whether a condition says that a number is not negative."""
    if len(expression.free_symbols) != 1:
        return False
    (symbol,) = expression.free_symbols
    return [expression.subs(symbol, value) for value in (-1, 0, 1, 2**40)] == [False, True, True, True]


def _symbol_of(node: fx.Node) -> Any:
    """The symbol of a node whose value is a symbol; None for any other node."""
    value = node.meta.get("val")
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return None
    expression = value.node._expr  # what it was, though it may have been found to be equal to another since
    return expression if expression.is_symbol else None


def _sizes_of(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _size(graph: fx.Graph, node: fx.Node, dim: int) -> fx.Node:
    """A new node that is a size of the tensor of a node."""
    with graph.inserting_after(node):
        size = graph.call_function(aten.sym_size.int, (node, dim))
    size.meta = {"val": node.meta["val"].shape[dim], "source": node.meta.get("source")}
    return size


def _assert(graph: fx.Graph, expression: Any, numbers: dict[Any, fx.Node], source: str | None) -> None:
    before = set(graph.nodes)
    tracer = GraphAppendingTracer(graph)
    values = {symbol: fx.Proxy(node, tracer) for symbol, node in numbers.items()}
    holds = sympy_interp(PythonReferenceAnalysis, values, expression)
    if isinstance(holds, fx.Proxy):
        where = "" if source is None else f", from {source}"
        text = f"a number that was read from a tensor{where} does not fulfil {expression}"
        graph.call_function(aten._assert_scalar.default, (holds.node, text))
    for node in graph.nodes:
        if node not in before:
            node.meta["source"] = source
