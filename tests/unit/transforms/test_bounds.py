"""Bounds of sizes that depend on data: where padding ends, what is more than a bound, and wrong options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.errors import ArgumentError


def no_grad(fn: Callable[..., Any], **options: Any) -> Any:
    return torch.no_grad()(pygraph.jit(fn, **options))


def test_experts_are_one_graph_for_all_routings(device: torch.device) -> None:
    experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2)).to(device)

    def route(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            token, which = torch.where(chosen == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, which, None])
        return out

    fast = no_grad(route, bounds={"nonzero": None}, strict=True)
    x, weights = torch.randn(6, 4, device=device), torch.rand(6, 2, device=device)
    for seed in range(4):
        chosen = torch.randint(0, 2, (6, 2), generator=torch.Generator().manual_seed(seed)).to(device) * (seed != 2)
        torch.testing.assert_close(fast(x, chosen, weights), torch.no_grad()(route)(x, chosen, weights))
    assert fast.__wrapped__.cache_info().captures == 1


def test_gradients_inside_of_a_graph(device: torch.device) -> None:
    layer = nn.Linear(4, 1).to(device)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        known = y > 0
        loss = (layer(x[known]).squeeze(1) - y[known]).square().mean()
        return torch.autograd.grad(loss, tuple(layer.parameters()))

    fast = pygraph.jit(step, bounds={"index": None}, strict=True)
    for seed in range(3):
        x, y = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(seed)).to(device)
        torch.testing.assert_close(fast(x, y[:, 0]), step(x, y[:, 0]))
    assert fast.cache_info().captures == 1


def test_gradients_from_outside(device: torch.device) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return x[y > 0].square().sum()

    fast = pygraph.jit(loss, bounds={"index": None})
    for seed in range(3):
        x, y = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed)).to(device)
        grads = [torch.autograd.grad(fn(z, y), z)[0] for fn in (fast, loss) for z in [x.clone().requires_grad_()]]
        assert torch.equal(*grads)


def test_results_of_the_function_have_their_own_size(device: torch.device) -> None:
    fast = no_grad(lambda x: (x[x > 0] * 2, torch.nonzero(x)), bounds={"index": None, "nonzero": None})
    for count in (3, 0, 5):
        x = torch.tensor([1.0] * count + [-1.0] * (5 - count), device=device)
        chosen, where = fast(x)
        assert torch.equal(chosen, x[x > 0] * 2)
        assert torch.equal(where, torch.nonzero(x))
        assert chosen.untyped_storage().nbytes() == 4 * count
    text = str(fast.__wrapped__.explain())
    assert "graph:patch" in text


def test_an_operation_without_a_rule_gets_what_is_not_padded(device: torch.device) -> None:
    fast = no_grad(lambda x: torch.logcumsumexp(x[x > 0] + 1, 0), bounds={"index": None})
    for shift in (0.0, 1.0):
        x = torch.arange(5.0, device=device) - 2 + shift
        torch.testing.assert_close(fast(x), torch.logcumsumexp(x[x > 0] + 1, 0))
    assert "padding would do" in str(fast.__wrapped__.explain())


def test_more_entries_than_their_bound_are_an_error(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("such an error ends the process's use of the device")
    fast = no_grad(lambda x: x[x > 0].sum(), bounds={"index": 3})
    x = torch.tensor([1.0, 2.0, 3.0, -1.0, -1.0], device=device)
    assert fast(x).item() == 6
    with pytest.raises(RuntimeError, match="more than 3 entries"):
        fast(x.abs())
    assert fast(x).item() == 6


@pytest.mark.parametrize(
    "write",
    [
        lambda x, i: x.new_zeros(5).index_put((i,), x.new_ones(())),
        lambda x, i: x.new_zeros(5).index_add(0, i, x[x > 0]),
        lambda x, i: x.new_zeros(5).scatter(0, i, x[x > 0]),
        lambda x, i: x[i],
    ],
    ids=["index_put", "index_add", "scatter", "index"],
)
@pytest.mark.parametrize("shift", [5, -9])
def test_an_index_out_of_range_is_an_error(device: torch.device, write: Any, shift: int) -> None:
    if device.type == "cuda":
        pytest.skip("such an error ends the process's use of the device")
    fast = no_grad(lambda x, k: write(x, torch.where(x > 0)[0] + k), bounds={"nonzero": None, "index": None})
    x = torch.tensor([1.0, 2.0, 3.0, -1.0, -1.0], device=device)
    for k in (0, 2):
        assert torch.equal(fast(x, k), write(x, torch.where(x > 0)[0] + k))
    with pytest.raises((IndexError, RuntimeError)):
        write(x, torch.where(x > 0)[0] + shift)
    with pytest.raises((IndexError, RuntimeError)):
        fast(x, shift)


def test_a_bound_by_the_line(device: torch.device) -> None:
    def fn(x: Tensor) -> Tensor:
        chosen = x[x > 0]
        return chosen.sum() + x[x < 0].sum()

    line = f"test_bounds.py:{fn.__code__.co_firstlineno + 1}"
    program = torch.no_grad()(pygraph.trace(fn))(torch.randn(5, device=device))
    targets = [str(node.target) for node in pygraph.devicify(program, bounds={line: None}).module.graph.nodes]
    assert targets.count("aten.searchsorted.Tensor") == 1
    assert targets.count("aten.index.Tensor") == 2  # by positions, and by the other mask


def test_random_numbers_are_not_padded(device: torch.device) -> None:
    fast = no_grad(lambda x: (x[x > 0] * torch.rand_like(x[x > 0])).sum(), bounds={"index": None})
    x = torch.arange(5.0, device=device) - 2
    found = []
    for fn in (fast, lambda x: (x[x > 0] * torch.rand_like(x[x > 0])).sum()):
        torch.manual_seed(3)
        found.append([fn(x + shift).item() for shift in (0, 1, 0)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"nonsense": 3}, "expected nonzero, index"),
        ({"nonzero": 0}, "expected a positive integer or None"),
        ({"nonzero": True}, "expected a positive integer or None"),
        (3, "expected a dict"),
    ],
)
def test_wrong_bounds(bounds: Any, message: str) -> None:
    for transform in (pygraph.jit, pygraph.devicify):
        with pytest.raises(ArgumentError, match=message):
            transform(torch.sin, bounds=bounds)


def test_wrong_bounds_for_a_program(device: torch.device) -> None:
    program = pygraph.trace(torch.sin)(torch.ones(2, device=device))
    with pytest.raises(ArgumentError, match="expected nonzero, index"):
        pygraph.devicify(program, bounds={"nonsense": 3})
