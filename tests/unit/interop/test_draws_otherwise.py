"""Graphs in which Inductor may draw in another order than eager: their results are laid out as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph.interop import compilers
from pygraph.lowering.draws import chain_draws

aten = torch.ops.aten


def graph_of(*, reads_all: bool) -> fx.Graph:
    """Two masks, of which the last one may be read by nobody."""
    graph = fx.Graph()
    arguments: Any = ([8], [1], torch.float32, torch.device("cuda"), 0.1, None)
    masks = [graph.call_function(torch.ops.pygraph.dropout_mask.default, arguments) for _ in range(2)]
    with FakeTensorMode():
        for mask in masks:
            mask.meta["val"] = torch.empty(8, dtype=torch.bool, device="cuda")
    graph.output(tuple(masks if reads_all else masks[:1]))
    return graph


@pytest.mark.parametrize("reads_all", [True, False])
@pytest.mark.parametrize("chained", [True, False])
def test_draws_that_inductor_may_exchange_or_drop(reads_all: bool, chained: bool) -> None:
    graph = graph_of(reads_all=reads_all)
    if chained:
        chain_draws(graph)
    found = compilers._may_draw_otherwise(graph)  # pyright: ignore[reportPrivateUsage]
    assert found == (not chained or not reads_all)


def test_reported_strides_are_forgotten() -> None:
    compilers._forget_reported_strides()  # pyright: ignore[reportPrivateUsage]
    with tracing(TracingContext(FakeTensorMode())), TracingContext.report_output_strides() as strides:
        assert strides is not None
        strides += [(1, 2), None]
        compilers._forget_reported_strides()  # pyright: ignore[reportPrivateUsage]
        assert strides == []
