"""Schedules: what must not run before a question is asked."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from pygraph.errors import TraceError
from pygraph.ir.decisions import ask
from pygraph.transforms import schedule
from pygraph.transforms.schedule import alternating_runs


@pytest.mark.parametrize("asserts", [False, True])
def test_a_question_that_stands_behind_a_draw_by_now(asserts: bool) -> None:
    """The draw takes what the question is about, and comes behind it in the function; perhaps with an assertion."""
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")

    def call(order: int, target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # pyright: ignore[reportArgumentType]
        node.meta["order"] = order
        return node

    rows = call(0, torch.ops.aten.index.Tensor, x, [mask])
    sized = call(4, torch.ops.pygraph.sized.default, rows, [2])
    drawn = call(5, torch.ops.aten.bernoulli.default, sized)
    size = call(1, torch.ops.aten.sym_size.int, rows, 0)
    asserted = [call(2, torch.ops.aten._assert_scalar.default, size, "it is positive")] if asserts else []
    question = call(3, ask(), size, 2, 0)
    reasons = dict.fromkeys((rows, sized, size, question, *asserted), "it is for the host")
    order = [node for _, run in alternating_runs(graph, reasons) for node in run]
    assert order.index(question) < order.index(sized) < order.index(drawn)


def test_nodes_that_wait_for_each_other_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.sin.default, (x,))
    second = graph.call_function(torch.ops.aten.cos.default, (x,))
    monkeypatch.setattr(schedule, "_dependencies", lambda graph, work: {first: {second}, second: {first}})
    with pytest.raises(TraceError, match=r"aten.sin.default, aten.cos.default"):
        alternating_runs(graph, {})
