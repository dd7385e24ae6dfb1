"""Questions about AOTAutograd's graphs, asked of graphs that are traced on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.interop import graph_queries


def graph_of(fn: Callable[..., Any], *args: Any, mode: str = "fake") -> fx.GraphModule:
    return make_fx(fn, tracing_mode=mode)(*args)


@pytest.mark.parametrize(
    ("fn", "mode", "expected"),
    [
        (lambda x: torch.relu(x) + 1, "fake", False),
        (lambda x: x.nonzero(), "symbolic", True),
        (lambda x: x.view(x.shape[0] * 2), "symbolic", False),
    ],
    ids=["elementwise", "a shape that depends on data", "sizes"],
)
def test_work_for_the_host(fn: Callable[..., Any], mode: str, expected: bool, device: torch.device) -> None:
    graph = graph_of(fn, torch.ones(4, 2, device=device), mode=mode).graph
    assert graph_queries.needs_host(graph) == expected
    assert not any("spec" in node.meta for node in graph.nodes)


def test_random_draws_are_listed_in_order() -> None:
    def fn(x: torch.Tensor) -> Any:
        return torch.rand(2, 3), torch.randn(x.shape[0])

    assert graph_queries.aten_random_draws(graph_of(fn, torch.ones(3)).graph) == [
        ("aten.rand.default", (2, 3)),
        ("aten.randn.default", (3,)),
    ]
    symbolic = graph_queries.aten_random_draws(graph_of(fn, torch.ones(3), mode="symbolic").graph)
    assert symbolic == [("aten.rand.default", (2, 3)), ("aten.randn.default", ())]


def test_devices() -> None:
    graph = graph_of(lambda x: x + 1, torch.ones(3))
    assert graph_queries.device_of(graph) == torch.device("cpu")
    assert not graph_queries.touches_cuda(graph)
    assert graph_queries.inductor_supports(graph, [torch.ones(3), 4])
    assert not graph_queries.inductor_supports(graph, [torch.ones(3, device="meta")])


def test_a_copy_has_the_metadata_of_nodes_and_is_independent() -> None:
    graph = graph_of(lambda x: torch.relu(x) + 1, torch.ones(3))
    graph.graph.output_node().meta["note"] = 1
    copy = graph_queries.copy_graph(graph)
    for old, new in zip(graph.graph.nodes, copy.graph.nodes, strict=True):
        assert old is not new
        assert old.meta == new.meta
    for node in copy.graph.nodes:
        node.meta["mine"] = True
    assert not any("mine" in node.meta for node in graph.graph.nodes)
    x = torch.randn(3)
    assert torch.equal(copy(x), graph(x))
