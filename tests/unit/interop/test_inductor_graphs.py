"""Graphs of Inductor's as functions: what they return, in wrappers that are written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import pygraph
from pygraph.interop.inductor_graphs import InductorSource
from pygraph.lowering.inductor import FusedGraph
from pygraph.lowering.states import Crossing

CPU = torch.device("cpu")


def call(args: list[Any]) -> Any:
    """With a size, a result that is an input, a view of one, one twice, nothing, and two that share memory."""
    n, x, w = args
    args.clear()
    buf0 = torch.empty_strided((n, 2), (2, 1))
    torch.mm(x, w, out=buf0)
    view = torch.ops.pygraph.reinterpret.default(buf0, [2], [1], 2 * n - 2)
    part = torch.ops.pygraph.reinterpret.default(x, [n], [2], 1)
    return (buf0, w, n * 2, part, buf0, None, view)


def bound(x: torch.Tensor, w: torch.Tensor, static: list[int]) -> Any:
    code = SimpleNamespace(current_callable=call)
    code_run = lambda inputs: call(inputs)  # noqa: E731
    code_run.current_callable = code.current_callable  # pyright: ignore
    graph = FusedGraph(code_run, (None,) * 7, (), frozenset(), Crossing(frozenset(), {}), CPU, "a graph")
    return InductorSource(graph).specialize([x.shape[0], x, w], static)


def test_the_order_of_draws_is_known_where_sizes_are() -> None:
    def call(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        buf0 = torch.ops.aten.rand.default([2, 2], dtype=torch.float32, device=CPU, pin_memory=False)
        buf1 = torch.ops.aten.randn.default([3], dtype=torch.float32, device=CPU, pin_memory=False)
        return (buf0, buf1, x)

    run: Any = lambda inputs: call(inputs)  # noqa: E731
    run.current_callable = call
    graph = FusedGraph(run, (None,) * 3, (), frozenset(), Crossing(frozenset(), {}), CPU, "a graph")
    draws = [("aten.rand.default", (2, 2)), ("aten.randn.default", (3,))]
    x = torch.randn(3)
    source = InductorSource(graph, draws)
    assert source.draws_in_order([x])
    kernels = source._kernels.graph  # pyright: ignore
    assert source.specialize([x], [])._kernels.graph is kernels  # pyright: ignore
    assert source._kernels is None  # pyright: ignore
    assert not InductorSource(graph, draws[::-1]).draws_in_order([x])
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        symbolic = mode.from_tensor(x, symbolic_context=context)
    assert not all(isinstance(size, int) for size in symbolic.shape)
    assert not source.draws_in_order([symbolic])


def test_results_for_each_size() -> None:
    w = torch.randn(2, 2)
    for static in ([], [2]):
        function = bound(torch.randn(3, 2), w, static)
        for n in (3, 5, 4):
            x = torch.randn(n, 2)
            passed = [n, x] if static else [n, x, w]
            expected = call([n, x, w])
            leaves = frozenset({0})
            program = function.trace(tuple(passed), {}, leaves, "a graph").program
            pygraph.check_program(program)
            for found in (function(*passed), pygraph.evaluate(program, *passed)):
                inputs = [n, x, w]
                results = [[*inputs, *found][position] for position in function.assembly]
                assert results[1] is w
                assert results[2] == 2 * n
                assert results[3].data_ptr() == x.data_ptr() + 4
                assert results[0].data_ptr() == results[4].data_ptr()
                assert results[5] is None
                assert results[6].data_ptr() == results[0].data_ptr() + (2 * n - 2) * 4
                for index in (0, 3, 4, 6):
                    assert torch.equal(results[index], expected[index])
