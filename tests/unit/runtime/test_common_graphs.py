"""Regions that compute the same have one graph: those of a function's ways, and those of the turns of its loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph


@pytest.fixture
def weights(device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, 64, device=device).reshape(8, 8)


def by_sign(weights: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of two ways, which have a product in common."""

    def fn(x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ weights) + 1
        if hidden.sum() > x.numel():
            return (hidden * 2).sin() + hidden
        return (hidden - 1).cos() * hidden

    return fn


def inputs(device: torch.device, count: int = 6) -> Iterator[Tensor]:
    """Inputs that go one way and the other."""
    for number in range(count):
        yield torch.full((4, 8), 0.1 * (number + 1), device=device) * torch.arange(8, device=device) * (-1) ** number


def check(device: torch.device, fn: Callable[[Tensor], Any], **options: Any) -> pygraph.Transformed[..., Any]:
    """Compare calls with eager, all results at the end, as each is to have memory of its own."""
    fast = pygraph.jit(fn, **options)
    results = [(fast(x), fn(x)) for x in inputs(device)]
    for result, expected in results:
        torch.testing.assert_close(result, expected)
    return fast


def test_ways_share_the_graph_before_their_question(device: torch.device, weights: Tensor) -> None:
    fast = check(device, by_sign(weights))
    assert fast.cache_info().captures == 3, str(fast.explain())  # one before the question, and one for each way


def test_ways_share_the_graph_behind_what_they_decide(device: torch.device, weights: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ weights) + 1
        if hidden.sum() > x.numel():
            hidden = (hidden * 2).sin() + hidden
        if hidden.mean() > 100:
            hidden = hidden + 1
        return (hidden @ weights).cos() * 2

    fast = check(device, fn)
    assert fast.cache_info().captures <= 4, str(fast.explain())


def test_turns_of_a_loop_share_a_graph(device: torch.device, weights: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.tanh(x @ weights) + x / 2
            if x.isnan().any():
                break
        return x

    fast = check(device, fn)
    assert fast.cache_info().captures <= 2, str(fast.explain())  # the first turn reads an argument


def test_a_way_that_makes_room_leaves_the_graph_to_the_other(device: torch.device, weights: Tensor) -> None:
    fast = check(device, by_sign(weights), max_graphs=1)
    assert fast.cache_info().evictions


def test_captured_tensors_have_graphs_of_their_own(device: torch.device, weights: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ holder[0]) + 1
        return hidden * 2 if hidden.sum() > x.numel() else hidden - 1

    holder = [weights]
    fast = pygraph.jit(fn)
    for number, x in enumerate(inputs(device)):
        if number == 3:
            holder[0] = weights.flip(0) + 1
        torch.testing.assert_close(fast(x), fn(x))


def test_other_settings_have_graphs_of_their_own(device: torch.device, weights: Tensor) -> None:
    fast, fn = pygraph.jit(by_sign(weights)), by_sign(weights)
    ways = list(inputs(device, 2))
    torch.testing.assert_close(fast(ways[0]), fn(ways[0]))
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        torch.testing.assert_close(fast(ways[1]), fn(ways[1]))
    finally:
        torch.use_deterministic_algorithms(before)
    assert fast.cache_info().captures == 4, str(fast.explain())


def test_updates_in_a_common_graph(device: torch.device, weights: Tensor) -> None:
    def fn(x: Tensor, total: Tensor) -> Tensor:
        hidden = torch.tanh(x @ weights) + 1
        if hidden.sum() > x.numel():
            hidden = hidden * 2
        total.add_(hidden.sum(0))
        weights.mul_(0.99)
        return hidden

    fast = pygraph.jit(fn)
    start = weights.clone()
    found: list[Any] = []
    for call in (fast, fn):
        weights.copy_(start)
        total = torch.zeros(8, device=device)
        results: list[Tensor] = []
        for x in inputs(device):
            version = weights._version
            results.append(call(x, total))
            assert weights._version > version
        found.append((results, total, weights.clone()))
    torch.testing.assert_close(found[0], found[1])


def test_what_is_common_is_forgotten_with_the_graphs(device: torch.device, weights: Tensor) -> None:
    fast, fn = check(device, by_sign(weights)), by_sign(weights)
    fast.cache_clear()
    for x in inputs(device):
        torch.testing.assert_close(fast(x), fn(x))
    assert fast.cache_info().captures == 3


def test_a_report_names_the_nodes_of_each_way(device: torch.device, weights: Tensor) -> None:
    fast = check(device, by_sign(weights))
    executables = [e.executable for one in fast.engine.family() for e in one.cache.entries if e.executable is not None]
    assert len(executables) == 2
    for executable in executables:
        for bound in executable.regions:
            if bound.graph is not None:
                assert bound.graph.recorded_nodes(bound.body.nodes).keys() <= set(bound.body.nodes)
    shared = [{id(graph) for graph in executable.graphs} for executable in executables]
    assert len(shared[0] & shared[1]) == 1
    assert all(call.outline is not None for call in fast.explain().calls)
