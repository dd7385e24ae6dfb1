"""Outputs that a region only allocates, as Inductor's code does for its kernels: they lie outside of the pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph.calls.options import Options
from pygraph.interop import live
from pygraph.interop.boxed import BoxedReplay
from pygraph.interop.inductor_graphs import InductorSource
from pygraph.lowering.inductor import FusedGraph
from pygraph.lowering.states import Crossing
from pygraph.runtime import own_results
from pygraph.runtime.capture import RegionGraph

SIZE = 800


def call(args: list[Any]) -> Any:
    """A result, and a saved tensor that the kernel before it has used as scratch memory."""
    (x,) = args
    args.clear()
    buf0 = torch.empty_strided(x.shape, x.stride(), device=x.device)
    torch.mm(x, x, out=buf0)
    buf1 = torch.empty_strided(x.shape, x.stride(), device=x.device)
    torch.sin(buf0, out=buf1)
    torch.cos(buf1, out=buf0)
    return (buf1, buf0)


def replayed(device: torch.device) -> BoxedReplay:
    code: Any = lambda inputs: call(inputs)  # noqa: E731
    code.current_callable = call
    states = Crossing(frozenset(), {})
    graph = FusedGraph(code, (None, None), (), frozenset(), states, device, "a graph", saved=frozenset({1}))
    return BoxedReplay(InductorSource(graph), [], Options(), live.pool_owner(), "a graph")


def graph_of(called: BoxedReplay) -> RegionGraph:
    (entry,) = called.functions()[0].cache.entries
    (graph,) = entry.executable.graphs  # pyright: ignore
    return graph


def check(called: BoxedReplay, device: torch.device, calls: int = 5) -> None:
    """All results stay as they are, whatever is called later."""
    found: list[tuple[Any, Any]] = []
    for _ in range(calls):
        x = torch.randn(SIZE, SIZE).to(device)
        found.append((called([x]), call([x])))
    for got, expected in found:
        torch.testing.assert_close(tuple(got), expected)


def test_the_pool_has_none_of_them(device: torch.device) -> None:
    called = replayed(device)
    check(called, device)
    graph = graph_of(called)
    assert graph.reuses_outputs is False
    pieces = graph.pool.segments()
    bases = [base for base in graph.saved.bases if base is not None]  # pyright: ignore
    assert bases
    assert not any(start <= base.data_ptr() < start + size for base in bases for start, size in pieces)
    if device.type != "cuda":  # where the workspace of cuBLAS is in the pool
        assert sum(size for _, size in pieces) < SIZE * SIZE * 4


def test_saved_tensors_begin_with_the_memory_of_the_recording(device: torch.device) -> None:
    called = replayed(device)
    first = called([torch.randn(SIZE, SIZE).to(device)])[1].data_ptr()
    assert first == graph_of(called).saved.bases[0].data_ptr()  # pyright: ignore
    for _ in range(4):
        assert called([torch.randn(SIZE, SIZE).to(device)])[1].data_ptr() == first


def test_memory_that_replays_may_write_to_stays_with_the_graph(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_results, "_left_alone", lambda proof, numbers: frozenset())
    called = replayed(device)
    check(called, device)
    graph = graph_of(called)
    held = graph._region.output_buffers  # pyright: ignore[reportPrivateUsage]
    assert len({buffer.data_ptr() for buffer in held}) == 2
    assert graph.saved.bases[0].data_ptr() not in {buffer.data_ptr() for buffer in held}  # pyright: ignore
