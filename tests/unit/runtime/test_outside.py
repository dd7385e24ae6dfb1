"""Outputs that a region only allocates, as Inductor's code does for its kernels: they lie outside of the pool."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pygraph.calls.options import Options
from pygraph.interop import live
from pygraph.interop.boxed import BoxedReplay
from pygraph.interop.inductor_graphs import InductorSource
from pygraph.lowering.inductor import FusedGraph
from pygraph.lowering.states import Crossing
from pygraph.runtime import discovery, host_copies, own_results, patchable
from pygraph.runtime.capture import RegionGraph
from tests.memory import live_bytes, peak_followed

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


def replayed(device: torch.device, call: Callable[[list[Any]], Any] = call, results: int = 2) -> BoxedReplay:
    code: Any = lambda inputs: call(inputs)  # noqa: E731
    code.current_callable = call
    name = f"{results} results"
    states = Crossing(frozenset(), {})
    saved = frozenset(range(1, results))
    graph = FusedGraph(code, (None,) * results, (), frozenset(), states, device, name, saved=saved)
    return BoxedReplay(InductorSource(graph), [], Options(), live.pool_owner(), name)


def graph_of(called: BoxedReplay) -> RegionGraph:
    (entry,) = called.functions()[0].cache.entries
    (graph,) = entry.executable.graphs  # pyright: ignore
    return graph


def check(called: BoxedReplay, device: torch.device, call: Callable[[list[Any]], Any] = call, calls: int = 5) -> None:
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


def test_saved_tensors_begin_with_the_memory_of_the_recording(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing else has been recorded there."""
    monkeypatch.setattr(host_copies, "LARGE", 2**30)
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


def make_chain() -> Callable[[list[Any]], Any]:
    """Results of which each is made of the one before, by a function of the name that Inductor's have."""

    def call(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        buf0 = torch.empty_strided(x.shape, x.stride(), device=x.device)
        torch.sin(x, out=buf0)
        buf1 = torch.empty_strided(x.shape, x.stride(), device=x.device)
        torch.cos(buf0, out=buf1)
        buf2 = torch.empty_strided(x.shape, x.stride(), device=x.device)
        torch.mul(buf0, buf1, out=buf2)
        buf3 = torch.empty_strided(x.shape, x.stride(), device=x.device)
        torch.add(buf0, buf2, out=buf3)
        return (buf0, buf1, buf2, buf3)

    return call


chain = make_chain()


def test_large_ones_are_recorded_in_one_memory(device: torch.device) -> None:
    """The first call needs that memory, the results as replays give them, and two tensors that are compared."""
    x = torch.randn(SIZE, SIZE).to(device)
    chain([x])
    before = live_bytes(device)
    called = replayed(device, chain, 4)
    with peak_followed(device) as peak:
        results = called([x])
    region = graph_of(called)._region  # pyright: ignore[reportPrivateUsage]
    assert region.overlapping == region.outside == frozenset(range(4))
    starts = sorted(one.extent.start for one in region.memory)
    assert {b - a for a, b in itertools.pairwise(starts)} == {512}
    if device.type != "cuda":  # where costs are measured meanwhile, and a graph that copies is tried
        assert peak[0] - before < 8 * x.nbytes
        assert live_bytes(device) - before <= 5 * x.nbytes
    del results
    check(called, device, chain)


def test_what_must_be_copied_is_recorded_in_memory_of_its_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    unprovable = patchable._unprovable_slots

    def one_more(region: Any, candidates: frozenset[int]) -> set[int]:
        (slot, *_) = sorted(candidates & region.output_slots)
        return unprovable(region, candidates) | {slot}

    monkeypatch.setattr(patchable, "_unprovable_slots", one_more)
    called = replayed(device, chain, 4)
    check(called, device, chain)
    graph = graph_of(called)
    assert graph._region.overlapping == frozenset()  # pyright: ignore[reportPrivateUsage]
    assert len(graph.patched_outputs) == 3


def test_integers_and_small_ones_lie_apart(device: torch.device) -> None:
    def call(args: list[Any]) -> Any:
        (x,) = args
        args.clear()
        buf0 = torch.empty_strided(x.shape, x.stride(), device=x.device)
        buf1 = torch.empty_strided(x.shape, x.stride(), device=x.device)
        buf2 = torch.empty_strided(x.shape, x.stride(), dtype=torch.float64, device=x.device)
        buf3 = torch.empty_strided(x.shape, x.stride(), dtype=torch.float64, device=x.device)
        buf4 = torch.empty_strided(x.shape, x.stride(), dtype=torch.bool, device=x.device)
        buf5 = torch.empty_strided(x.shape, x.stride(), dtype=torch.bool, device=x.device)
        buf6 = torch.empty_strided((SIZE,), (1,), device=x.device)
        torch.sin(x, out=buf0)
        torch.cos(x, out=buf1)
        torch.add(x, buf0, out=buf2)
        torch.add(x, buf1, out=buf3)
        torch.gt(buf0, buf1, out=buf4)
        torch.lt(buf0, buf1, out=buf5)
        torch.sum(buf0, 0, out=buf6)
        return (buf0, buf1, buf2, buf3, buf4, buf5, buf6)

    called = replayed(device, call, 7)
    for _ in range(3):
        x = torch.randn(SIZE, SIZE).to(device) * 10
        torch.testing.assert_close(tuple(called([x])), call([x]))
    region = graph_of(called)._region  # pyright: ignore[reportPrivateUsage]
    dtypes = {region.memory[number].spec.dtype for number in region.overlapping}
    assert (len(region.overlapping), dtypes) == (4, {torch.float32, torch.float64})


@pytest.mark.parametrize("number", range(9))
def test_a_pointer_that_is_not_found(device: torch.device, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Wherever one kernel has it: the proof fails, and the results are recorded in memory of their own."""
    find = discovery.pointer_words
    missed: list[Any] = []

    def without_one(*args: Any) -> list[Any]:
        words = find(*args)
        # The emulated device's kernels have addresses of before behind operands, which may be those of results.
        operands = ((16, 32), (16, 32), (16, 40, 64), (16, 32, 48))
        real = [word for word in words if device.type == "cuda" or word.offset in operands[word.node]]
        outputs = [word for word in real if word.slot > 0]
        missed.append(outputs[number % len(outputs)])
        return [word for word in words if word != missed[-1]]

    monkeypatch.setattr(discovery, "pointer_words", without_one)
    called = replayed(device, chain, 4)
    check(called, device, chain)
    assert len(missed) > 1, "it was recorded again"
    assert graph_of(called)._region.overlapping == frozenset()  # pyright: ignore[reportPrivateUsage]
