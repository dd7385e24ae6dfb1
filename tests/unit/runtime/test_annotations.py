"""Notes for profilers about the nodes of graphs (operation, line and scopes), and torch's store of them."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch.profiler import record_function

import pygraph
from pygraph.runtime.recorded_graph import RecordedGraph

annotations = pytest.importorskip("pygraph.runtime.cuda.annotations")
NOTES = {"operation": "aten.sin.default", "source": "train.py:3", "scopes": "outer / inner"}


def test_every_node_of_a_graph_has_a_note(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with record_function("outer"):
            y = x.sin()
            with record_function("inner"):
                y = y.exp()
        return y.cos()

    found: list[list[dict[str, str]]] = []

    def annotate(graph: RecordedGraph, note: Any) -> None:
        found.append([note(node.op) for node in graph.nodes])
        assert note(-1) == {"operation": "pygraph"}

    for one in (RecordedGraph, *RecordedGraph.__subclasses__()):
        if "annotate" in vars(one):
            monkeypatch.setattr(one, "annotate", annotate)
    pygraph.graphify(pygraph.indirect(function, mechanism="host"))(torch.ones(4, device=device))
    (notes,) = found
    kernels = {note["operation"]: note for note in notes}
    scopes = [kernels[f"aten.{name}.default"]["scopes"] for name in ("sin", "exp", "cos")]
    assert scopes == ["outer", "outer / inner", ""]
    assert all(note["source"].startswith("test_annotations.py:") for note in notes)


class Driver:
    """What is asked of CUDA's driver: numbers of graphs and nodes."""

    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, error: int = 0) -> None:
        self._error = error

    def cuGraphExecGetId(self, executable: int) -> tuple[int, int]:
        return 0, executable

    def cuGraphNodeGetToolsId(self, node: int) -> tuple[int, int]:
        return self._error, (77 << 32) + node  # the number of the graph that was captured, and the node's


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("torch.cuda._graph_annotations")  # new in torch 2.13
    monkeypatch.setattr(annotations, "cu", Driver())
    module.enable_annotations()
    yield module
    module.disable_annotations()
    module.clear_kernel_annotations()


def test_torch_writes_them_into_the_file_of_a_profile(torchs: Any) -> None:
    from torch.cuda._annotate_cuda_graph_trace import annotate_trace

    keys = annotations.annotate(5, [(3, NOTES), (4, {"operation": "pygraph"})])
    event: dict[str, Any] = {"cat": "kernel", "ph": "X", "tid": 7, "ts": 0, "args": {"graph node id": (5 << 32) + 3}}
    assert annotate_trace({"traceEvents": [event]}, torchs.get_kernel_annotations()) == 1
    assert {name: event["args"][name] for name in NOTES} == NOTES
    torchs.disable_annotations()
    annotations.forget(keys)
    assert not torchs.get_kernel_annotations()


def test_nothing_is_annotated_unless_it_is_switched_on(torchs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torchs.disable_annotations()
    assert annotations.annotate(5, [(3, NOTES)]) == []
    torchs.enable_annotations()
    monkeypatch.setattr(annotations, "cu", Driver(error=36))  # the driver is too old
    assert annotations.annotate(5, [(3, NOTES)]) == []
    monkeypatch.setattr(annotations, "cu", types.SimpleNamespace())  # the bindings are
    assert annotations.annotate(5, [(3, NOTES)]) == []
    monkeypatch.setattr(annotations, "cu", Driver())
    monkeypatch.setattr(torchs, "_kernel_annotations", {})  # of a later torch
    assert annotations.annotate(5, [(3, NOTES)]) == []
    monkeypatch.delitem(sys.modules, "torch.cuda._graph_annotations")
    assert annotations.annotate(5, [(3, NOTES)]) == []
    annotations.forget([1])
