"""Schedules: what must not run before a question is asked."""

from __future__ import annotations

import torch
from torch import fx

from pygraph.ir.decisions import ask
from pygraph.transforms.schedule import alternating_runs


def test_a_question_that_stands_behind_a_draw_by_now() -> None:
    """The draw takes what the question is about, and comes behind it in the function."""
    graph = fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")

    def call(order: int, target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # pyright: ignore[reportArgumentType]
        node.meta["order"] = order
        return node

    rows = call(0, torch.ops.aten.index.Tensor, x, [mask])
    sized = call(3, torch.ops.pygraph.sized.default, rows, [2])
    drawn = call(4, torch.ops.aten.bernoulli.default, sized)
    size = call(1, torch.ops.aten.sym_size.int, rows, 0)
    question = call(2, ask(), size, 2, 0)
    reasons = dict.fromkeys((rows, sized, size, question), "it is for the host")
    order = [node for _, run in alternating_runs(graph, reasons) for node in run]
    assert order.index(question) < order.index(sized) < order.index(drawn)
