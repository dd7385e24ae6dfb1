"""Boxed callables: which static inputs have graphs of their own, and how results are assembled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.calls.options import Options
from pygraph.interop import boxed, live
from pygraph.interop.aten_graphs import AtenSource
from pygraph.interop.specialized import SpecializedGraph
from pygraph.transforms.passes import UNFUSED


def graph_of(fn: Any, *args: Any) -> fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*args)


def replay(graph: fx.GraphModule, static: Sequence[int] | None) -> boxed.BoxedReplay:
    source = AtenSource(graph, UNFUSED, lambda inputs: graph(*inputs))
    return boxed.BoxedReplay(source, static, Options(), live.pool_owner(), "a graph")


def test_each_set_of_static_inputs_has_a_graph_until_there_are_too_many(device: torch.device) -> None:
    graph = graph_of(lambda x, w: (x * w, x), torch.ones(3, device=device), torch.ones(3, device=device))
    call = replay(graph, [1])
    weights = [torch.full((3,), float(n), device=device) for n in range(boxed._MAX_SPECIALIZATIONS + 2)]
    for count, w in enumerate(weights, 1):
        for _ in range(2):
            x = torch.ones(3, device=device)
            inputs = [x, w]
            product, same = call(inputs)
            assert inputs == []
            assert same is x
            assert torch.equal(product, w)
        assert len(call.functions()) == (count if count <= boxed._MAX_SPECIALIZATIONS else 1)
    call.reset()
    assert call.functions() == []
    assert torch.equal(call([torch.ones(3, device=device), weights[2]])[0], weights[2])


def test_parameters_are_static_where_nothing_else_is_said(device: torch.device) -> None:
    w = torch.nn.Parameter(torch.ones(3, device=device), requires_grad=False)
    graph = graph_of(lambda x, w: [x * w], torch.ones(3, device=device), w)
    call = replay(graph, None)
    call([torch.ones(3, device=device), w])
    (specialization,) = call._specializations.values()
    assert specialization._static == [w]


@pytest.mark.parametrize("static", [[], [1]])
def test_the_plan_of_results(static: list[int]) -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, w))
    view = graph.call_function(torch.ops.aten.view.default, (x, [3]))
    graph.output((w, total, view, x, total))
    inputs = [torch.ones(3), torch.zeros(3)]
    specialized = SpecializedGraph(inputs, static)
    specialized._plan_results(graph, [0, 1], epilogue_results=[2])
    assert specialized.varying == ((0,) if static else (0, 1))
    assert specialized._all_inputs([inputs[index] for index in specialized.varying]) == inputs
    assert specialized._computed == [1, 4]
    assembly = specialized.assembly
    assert assembly is not None
    found = [*inputs, "first", "second", "of the epilogue"]
    results = [found[position] for position in assembly]
    assert results[1:3] + results[4:] == ["first", "of the epilogue", "second"]
    assert results[0] is inputs[1]
    assert results[3] is inputs[0]


def test_results_that_are_all_computed_need_no_plan() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.neg.default, (x,)), None))
    specialized = SpecializedGraph([torch.ones(3)], [])
    specialized._plan_results(graph, [0])
    assert specialized.assembly is None
