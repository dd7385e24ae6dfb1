"""Saved tensors of calls in Python: they begin in the memory of the recording, and stay there while nobody has them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pygraph
from pygraph.interop import live
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.selections import Candidate
from pygraph.runtime import saved_memory
from pygraph.runtime.capture import RegionGraph
from pygraph.runtime.saved_memory import ANY_STREAM, SavedMemory
from pygraph.runtime.selecting import RegionSelector
from tests.memory import live_bytes

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "sizes"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's and Inductor's, which differ between versions
]

WIDTH = 1 << 16


@pytest.fixture(autouse=True)
def _in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every call run in Python, as before the extension is built."""
    monkeypatch.setattr("pygraph.process.extension.loaded", lambda: None)


@pytest.fixture(autouse=True)
def _no_keepers() -> Iterator[None]:
    yield
    saved_memory.release_unused()


def block(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.cos(x) * 2) * torch.exp(x)


def entries() -> list[Any]:
    """What is recorded of all kinds of calls."""
    found = [entry for called in live.CALLABLES for f in called.functions() for entry in f.cache.entries]
    return [entry for entry in found if entry.executable is not None]


def graphs() -> list[RegionGraph]:
    """The graphs of forwards that save tensors."""
    found = [graph for entry in entries() for graph in entry.executable.graphs]
    return [graph for graph in found if graph.saved is not None]


def compiled(fn: Callable[..., Any] = block) -> Any:
    # Of kernels that Inductor has fused, nothing lies in the pool: see `test_outside`.
    return torch.compile(fn, backend=pygraph.backend, dynamic=False, options={"fuse": False})


def leaf(device: torch.device, size: int = WIDTH) -> torch.Tensor:
    return torch.randn(size).to(device).requires_grad_()


def check_gradient(fn: Any, x: torch.Tensor, eager: Callable[..., Any] = block) -> None:
    (got,) = torch.autograd.grad(fn(x).sum(), x)
    (expected,) = torch.autograd.grad(eager(x).sum(), x)
    torch.testing.assert_close(got, expected)


def saved(result: torch.Tensor) -> list[torch.Tensor]:
    return [tensor for tensor in result.grad_fn.saved_tensors if not tensor.requires_grad]  # pyright: ignore


def is_in(pieces: list[tuple[int, int]], tensor: torch.Tensor) -> bool:
    return any(start <= tensor.data_ptr() < start + size for start, size in pieces)


def test_it_begins_with_the_memory_of_the_recording(device: torch.device) -> None:
    fast, x = compiled(), leaf(device)
    before = live_bytes(device)
    first = fast(x)
    (graph,) = graphs()
    tensors = saved(first)
    assert tensors
    assert all(is_in(graph.pool.segments(), tensor) for tensor in tensors), str(pygraph.explain())
    addresses = [tensor.data_ptr() for tensor in tensors]
    del tensors
    for _ in range(3):
        first.sum().backward()
        del first
        x.grad = None
        first = fast(x)
        assert [tensor.data_ptr() for tensor in saved(first)] == addresses
    bytes_saved = sum(tensor.nbytes for tensor in saved(first))
    del first
    assert live_bytes(device) - before <= bytes_saved + 4096, "no memory besides"


def test_it_is_kept_while_other_ways_are_tried(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with copies is recorded too, and replayed in turn with the one that stays."""
    monkeypatch.setattr(RegionSelector, "_worth_a_try", lambda self, graph, seconds: [Candidate("copy")])
    fast, x = compiled(), leaf(device)
    first = fast(x)
    (graph,) = graphs()
    selections = [selection for entry in entries() for selection in entry.executable.selections.values()]
    tried = {one.candidate.way for selection in selections for one in selection.compared}
    assert tried == {"patch", "copy", "launch"}
    assert saved(first)
    assert all(is_in(graph.pool.segments(), tensor) for tensor in saved(first))


def test_two_forwards_before_a_backward(device: torch.device) -> None:
    fast, x, y = compiled(), leaf(device), leaf(device)
    for _ in range(3):
        (got,) = torch.autograd.grad((fast(x) + fast(x * 2)).sum(), x)
        (expected,) = torch.autograd.grad((block(x) + block(x * 2)).sum(), x)
        torch.testing.assert_close(got, expected)
        check_gradient(fast, y)


def test_saved_tensors_that_somebody_holds_stay_as_they_are(device: torch.device) -> None:
    fast, x = compiled(), leaf(device)
    for _ in range(2):
        result = fast(x)
        tensors = saved(result)
        views, values = [tensor[3:9] for tensor in tensors], [tensor.clone() for tensor in tensors]
        result.sum().backward()
        del result
        check_gradient(fast, leaf(device))
        torch.testing.assert_close(tensors, values)
        tensors.clear()
        check_gradient(fast, leaf(device))
        torch.testing.assert_close(views, [value[3:9] for value in values])


def test_saved_tensors_outlive_the_graphs_and_their_pool(device: torch.device) -> None:
    fast, x = compiled(), leaf(device)
    check_gradient(fast, x)
    result = fast(x)
    tensors = saved(result)
    values = [tensor.clone() for tensor in tensors]
    torch._dynamo.reset()
    gc.collect()
    others = [torch.full((WIDTH,), 3.0, device=device) for _ in range(20)]
    check_gradient(compiled(lambda x: block(x) * 3), leaf(device), lambda x: block(x) * 3)
    torch.testing.assert_close(tensors, values)
    assert all(bool((other == 3.0).all()) for other in others)
    (got,) = torch.autograd.grad(result.sum(), x)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    torch.testing.assert_close(got, expected)


def test_graphs_of_one_pool_do_not_write_to_each_others_saved_tensors(device: torch.device) -> None:
    """Forwards that are recorded later, on memory that values of earlier graphs have left, and replays in any order."""
    names = [lambda x, k=k: block(torch.tanh(x) * k) * torch.sigmoid(x) for k in range(1, 4)]
    functions = [(compiled(fn), fn) for fn in names]
    for _ in range(3):
        x = leaf(device)
        results = [fast(x) for fast, _ in functions]
        for index in (1, 0, 2):
            again = functions[index - 1][0](x)
            (got,) = torch.autograd.grad(results[index].sum(), x)
            (expected,) = torch.autograd.grad(functions[index][1](x).sum(), x)
            torch.testing.assert_close(got, expected)
            del again


def test_parts_of_one_model_all_keep_theirs(device: torch.device) -> None:
    parts = [compiled(lambda x, k=k: block(x * k)) for k in (1, 2)]

    def step() -> None:
        x = leaf(device)
        y = parts[1](parts[0](x))
        (got,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(got, torch.autograd.grad(block(block(x) * 2).sum(), x)[0])

    step()
    first, second = graphs()
    addresses = [base.data_ptr() for graph in (first, second) for base in graph.saved.bases]  # pyright: ignore
    for _ in range(3):
        step()
        assert [base.data_ptr() for graph in (first, second) for base in graph.saved.bases] == addresses  # pyright: ignore


def test_graphs_that_are_used_in_turn_do_not(device: torch.device) -> None:
    parts = [(compiled(lambda x, k=k: block(x * k)), lambda x, k=k: block(x * k)) for k in (1, 2)]
    x = leaf(device)
    for fast, eager in parts * 2:
        check_gradient(fast, x, eager)
    holders = [graph for graph in graphs() if any(base is not None for base in graph.saved.bases)]  # pyright: ignore
    assert len(holders) == 1


def test_blocks_that_are_recomputed_need_the_pool_of_one(device: torch.device) -> None:
    """Each is recorded where the one before it has given its memory back."""

    def pool_of(count: int) -> int:
        parts = [compiled(lambda x, k=k: block(block(x * k))) for k in range(count)]
        for _ in range(2):
            y = torch.ones(1 << 20, device=device, requires_grad=True)
            for part in parts:
                y = checkpoint(part, y, use_reentrant=True)
            y.sum().backward()  # pyright: ignore
        found = graphs()
        assert len(found) == count
        nbytes = found[0].pool.nbytes()
        del found, parts
        torch._dynamo.reset()
        gc.collect()
        return nbytes

    one = pool_of(1)
    assert pool_of(3) <= one


def test_fresh_memory_where_torch_fills_it_and_under_hooks(device: torch.device) -> None:
    fast, x = compiled(), leaf(device)
    check_gradient(fast, x)
    (graph,) = graphs()

    def is_kept(result: torch.Tensor) -> bool:
        kept = {base.data_ptr() for base in graph.saved.bases if base is not None}  # pyright: ignore
        return any(tensor.data_ptr() in kept for tensor in saved(result))

    assert is_kept(fast(x))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        result = fast(x)
    assert not is_kept(result)
    torch.use_deterministic_algorithms(True)
    try:
        assert not graph.saved.take()  # pyright: ignore
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_memory_of_a_wrong_reservation_is_not_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that lie in memory which values before them have left."""
    monkeypatch.setattr("pygraph.runtime.reservations.Reservations.free_for", lambda self, op: None)
    fast, x = compiled(lambda x: block(torch.tanh(torch.sigmoid(x)))), leaf(device)
    for _ in range(3):
        (got,) = torch.autograd.grad((fast(x) + fast(x * 2)).sum(), x)
        eager = lambda x: block(torch.tanh(torch.sigmoid(x)))  # noqa: E731
        (expected,) = torch.autograd.grad((eager(x) + eager(x * 2)).sum(), x)
        torch.testing.assert_close(got, expected)
    (graph,) = graphs()
    assert not any(is_in(graph.pool.segments(), base) for base in graph.saved.bases if base is not None)  # pyright: ignore


def test_modules_and_jitted_functions_keep_theirs(device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh()).to(device)
    example = torch.randn(64, 64).to(device)
    graphed = pygraph.make_graphed_callables(net, (example,))
    jitted = pygraph.jit(block)
    for fn in (graphed, jitted):
        live_after: list[int] = []
        for _ in range(5):
            x = torch.randn(64, 64).to(device).requires_grad_()
            fn(x).sum().backward()
            net.zero_grad()
            del x
            live_after.append(live_bytes(device))
        assert len(set(live_after[1:])) == 1, "nothing is allocated in later steps that stays"


# ---- the memory alone -------------------------------------------------------------------------------------------


def memory_on(stream: list[int], device: torch.device) -> SavedMemory:
    spec = TensorSpec((8,), (1,), torch.float32, device)
    return SavedMemory({0: spec, 2: spec}, {0: spec.empty()}, {0}, lambda: stream[0], [])


def test_another_stream_has_other_memory(device: torch.device) -> None:
    stream = [7]
    saved = memory_on(stream, device)
    assert list(saved.streams) == [ANY_STREAM, 7]
    first = saved.take()[0].data_ptr()
    assert saved.take()[0].data_ptr() == first
    stream[0] = 8
    other = saved.take()[0]
    assert other.data_ptr() != first
    assert list(saved.streams) == [8, 8]
    saved.forget_streams()
    assert list(saved.streams) == [8, 8], "it is memory of the pool no more"


def test_memory_of_the_pool_is_free_for_any_stream_after_timing(device: torch.device) -> None:
    stream = [7]
    saved = memory_on(stream, device)
    first = saved.take()[0].data_ptr()
    saved.forget_streams()
    assert list(saved.streams) == [ANY_STREAM, 7]
    stream[0] = 8
    assert saved.take()[0].data_ptr() == first


def test_tensors_of_two_calls_have_versions_of_their_own(device: torch.device) -> None:
    saved = memory_on([7], device)
    first = saved.take()[0]
    first.add_(1)
    address, version = first.data_ptr(), first._version
    del first
    second = saved.take()[0]
    assert second.data_ptr() == address
    assert version
    assert not second._version


def test_released_memory_is_made_anew(device: torch.device) -> None:
    saved = memory_on([7], device)
    held = saved.take()
    assert saved.is_used()
    saved.release()
    assert saved.bases == [None, None]
    assert not saved.is_keeper.value
    again = saved.take()
    assert {one.data_ptr() for one in held.values()}.isdisjoint(one.data_ptr() for one in again.values())
