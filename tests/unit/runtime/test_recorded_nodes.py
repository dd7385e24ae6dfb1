"""What graphs have recorded for each node of a Program, and how that gets its pointers, for reports."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

import pygraph

pytestmark = pytest.mark.usefixtures("empty_padding")


def compiled(device: torch.device, mechanism: Any) -> Any:
    def fn(x: torch.Tensor, w: torch.Tensor, k: float) -> torch.Tensor:
        return torch.softmax(torch.relu(x @ w) * k, -1)

    fast = pygraph.graphify(pygraph.indirect(pygraph.devicify(fn), mechanism=mechanism))
    x = torch.ones(4, 4, device=device)
    return fast.lower(x, x + 1, 2.0).compile()


@pytest.mark.parametrize("mechanism", ["host", "device", "table", "copy"])
def test_nodes_add_up_to_those_of_the_graph(device: torch.device, mechanism: str) -> None:
    executable = compiled(device, mechanism)._entry.executable
    (graph,) = executable.graphs
    recorded = graph.recorded_nodes(graph.body.nodes)
    names = Counter(name for kernels, _ in recorded.values() for name in kernels)
    assert names == Counter(node.name for node in graph.graph.nodes if node.op >= 0)
    assert set(recorded) <= set(graph.body.nodes)
    totals: Counter[str] = Counter()
    for _, text in recorded.values():
        for count, way in re.findall(r"(\d+) (by the host|by the device|by a table|of a copy)", text):
            totals[("number " if f"numbers: {count} {way}" in text else "") + way] += int(count)
    assert totals["by the host"] == len([word for word in graph.choice.host if graph.graph.nodes[word.node].op >= 0])
    assert totals["by the device"] == len(graph.choice.device)
    assert totals["by a table"] == len(graph.choice.table)
    assert (totals["of a copy"] > 0) == (mechanism == "copy")
    assert totals["number by the host"] >= 1


def test_nodes_without_changes_say_so(device: torch.device) -> None:
    (graph,) = compiled(device, "host")._entry.executable.graphs
    texts = {str(node.target): text for node, (_, text) in graph.recorded_nodes(graph.body.nodes).items()}
    assert texts["aten.relu.default"] == "as recorded"
