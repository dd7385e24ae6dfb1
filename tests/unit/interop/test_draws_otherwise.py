"""Graphs in which Inductor may draw in another order than eager: their results are laid out as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pygraph.calls.options import Options
from pygraph.interop import compilers
from pygraph.interop.compilers import Compilers, Settings

aten = torch.ops.aten


class Compiled(Exception):
    """Inductor would compile a graph now, of which these results are to have eager's strides."""


def visible_results(monkeypatch: pytest.MonkeyPatch, *, draws: int, symbolic: bool) -> Any:
    """The results that have to have eager's strides, of a graph that draws so many times."""

    def compile_graph(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
        raise Compiled(graph.graph.output_node().meta.get("user_visible_output_idxs"))

    monkeypatch.setattr(compilers, "compile_graph", compile_graph)
    mode, context = FakeTensorMode(shape_env=ShapeEnv()), StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    shape = mode.from_tensor(torch.empty(8), symbolic_context=context).shape if symbolic else (8,)
    with mode:
        x = torch.empty(shape, device="cuda")
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    nodes[0].meta["val"] = x
    for _ in range(draws):
        nodes.append(graph.call_function(aten.rand.default, ([8],), {"device": torch.device("cuda")}))
        with mode:
            nodes[-1].meta["val"] = torch.empty(8, device="cuda")
    graph.output((*nodes[1:], None))
    module = fx.GraphModule(torch.nn.Module(), graph)
    made = Compilers(Settings(Options(), True, True, {}), module)
    with pytest.raises(Compiled) as caught:
        made.inductor(module, [x], is_inference=True)
    return caught.value.args[0]


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("draws", [1, 3])
def test_of_sizes_that_are_symbols(draws: int, symbolic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some sizes the graph may be made in another way than of these, and both have to have one layout."""
    found = visible_results(monkeypatch, draws=draws, symbolic=symbolic)
    assert found == ([0, 1, 2] if symbolic and draws > 1 else None)


def test_reported_strides_are_forgotten() -> None:
    compilers._forget_reported_strides()  # pyright: ignore[reportPrivateUsage]
    with tracing(TracingContext(FakeTensorMode())), TracingContext.report_output_strides() as strides:
        assert strides is not None
        strides += [(1, 2), None]
        compilers._forget_reported_strides()  # pyright: ignore[reportPrivateUsage]
        assert strides == []
