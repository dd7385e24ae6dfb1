"""Results in the same memory at every call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pygraph
from pygraph.runtime.devices import driver_for

pytestmark = pytest.mark.usefixtures("sizes")


def ones(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel(), device=device).view(shape).clone()


def graphs(fn: Callable[..., Any], **options: Any) -> Any:
    return pygraph.graphify(pygraph.indirect(pygraph.devicify(fn)), reuse_outputs=True, **options)


def reasons(fn: Any) -> list[str]:
    return [fallback["what"] for fallback in fn.explain().to_dict()["fallbacks"]]


@pytest.mark.parametrize("wrap", [graphs, lambda fn: pygraph.graphify(pygraph.devicify(fn), reuse_outputs=True)])
def test_nothing_is_allocated_or_patched_for_results(device: torch.device, wrap: Any) -> None:
    driver = driver_for(device)
    assert driver is not None
    fn = wrap(lambda x, k: (torch.tanh(x) * k, x.sum(), x[1:] * 2))
    x = ones(device, 8, 8)
    fn(x, 2.0)
    first = fn(x, 3.0)
    total, patches = driver.allocated_total(), driver.counters.patches
    second = fn(x, 3.0)
    assert driver.allocated_total() == total
    assert driver.counters.patches == patches
    assert [a.data_ptr() for a in first] == [b.data_ptr() for b in second]
    assert all(a is not b for a, b in zip(first, second, strict=True))
    torch.testing.assert_close(second, (torch.tanh(x) * 3, x.sum(), x[1:] * 2))
    assert fn.explain().to_dict()["fallbacks"] == []


def test_jit_takes_the_option(device: torch.device) -> None:
    fn = pygraph.jit(lambda x: torch.tanh(x) * x + x, reuse_outputs=True)
    x = ones(device, 4)
    assert fn(x).data_ptr() == fn(x + 1).data_ptr()


def test_a_result_is_overwritten_by_the_next_call(device: torch.device) -> None:
    fn = graphs(lambda x: x * 2)
    x = ones(device, 4)
    first = fn(x)
    fn(x + 1)
    assert torch.equal(first, (x + 1) * 2)


def test_a_result_may_be_the_next_argument(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.flip(x, [0]).cumsum(0) / 2

    fn = graphs(step)
    mine = eager = ones(device, 4, 4)
    for _ in range(5):
        mine, eager = fn(mine), step(eager)
        assert torch.equal(mine, eager)
    assert torch.equal(fn(fn(eager)[:]), step(step(eager)))
    assert reasons(fn) == ["an argument is copied"]


def test_a_result_of_another_kind_of_call_may_be_the_argument(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, x + 1])
        return torch.tanh(y).cumsum(0)

    fn = graphs(step, max_graphs=2)
    for _ in range(3):
        mine = eager = ones(device, 2, 4)
        for _ in range(4):  # also results of graphs that have made room for others
            mine, eager = fn(mine), step(eager)
            assert torch.equal(mine, eager)


def test_an_updated_result_is_updated(device: torch.device) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    fn = graphs(step)
    first = fn(ones(device, 4))
    value = first.clone()
    second = fn(first)
    assert torch.equal(first, value + 1)
    assert torch.equal(second, (value + 1) * 2)
    assert reasons(fn) == ["the call"]


def test_a_result_that_is_returned_again(device: torch.device) -> None:
    fn = graphs(lambda x: (x, x[1:], x * 2))
    first = fn(ones(device, 4))[2]
    value = first.clone()
    same, view, twice = fn(first)
    assert same is first
    assert torch.equal(same, value)
    assert torch.equal(view, value[1:])
    assert torch.equal(twice, value * 2)


def test_results_that_share_memory_still_do(device: torch.device) -> None:
    fn = graphs(lambda x: ((y := x * 2), y[1:], y.view(2, 2)))
    for n in range(3):
        y, view, square = fn(ones(device, 4) + n)
        y.add_(1)
        assert torch.equal(view, (ones(device, 4) + n)[1:] * 2 + 1)
        assert torch.equal(square.reshape(-1), y)


def test_changing_a_result_object_changes_no_other(device: torch.device) -> None:
    fn = graphs(lambda x: x * 2)
    x = ones(device, 2, 3)
    fn(x).t_().resize_(3, 2)
    assert torch.equal(fn(x), x * 2)


def test_autograd_notices_that_a_saved_result_was_overwritten(device: torch.device) -> None:
    fn = graphs(lambda x: x * 2)
    x = ones(device, 4)
    weight = torch.ones(4, device=device, requires_grad=True)
    with torch.no_grad():
        result = fn(x)
    loss = (result * weight).sum()
    with torch.no_grad():
        fn(x + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_regions_with_eager_work_between(device: torch.device) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.sin(x) * 2
        few = a[a > 0]
        b = torch.cos(few.sum() + a)
        return a, few, b, y.add_(1), b.cumsum(0)

    fn = graphs(step)
    y_mine, y_eager = ones(device, 3), ones(device, 3)
    for n in range(4):
        x = ones(device, 4, 4) + n
        torch.testing.assert_close(fn(x, y_mine), step(x, y_eager))


def test_in_inference_mode(device: torch.device) -> None:
    fn = graphs(lambda x: x * 2)
    with torch.inference_mode():
        for n in range(3):
            assert torch.equal(fn(ones(device, 4) + n), (ones(device, 4) + n) * 2)


def test_random_streams(device: torch.device) -> None:
    fn = graphs(lambda x: torch.rand_like(x) + x)
    torch.manual_seed(0)
    mine = [fn(ones(device, 4)).clone() for _ in range(3)]
    torch.manual_seed(0)
    assert torch.equal(torch.stack(mine), torch.stack([torch.rand_like(x) + x for x in [ones(device, 4)] * 3]))


def test_a_held_result_outlives_the_function(device: torch.device) -> None:
    fn = graphs(lambda x: x * 2)
    result = fn(ones(device, 64))
    fn.cache_clear()
    del fn
    gc.collect()
    junk = [torch.full((64,), float("nan"), device=device) for _ in range(8)]
    other = graphs(lambda x: x + 1)
    other(junk[0])
    assert torch.equal(result, ones(device, 64) * 2)


@given(calls=st.lists(st.tuples(st.integers(0, 3), st.sampled_from((1, 2, 3))), min_size=2, max_size=8))
def test_the_latest_results_are_those_of_eager(device: torch.device, calls: list[tuple[int, int]]) -> None:
    """Calls of several kinds, on fresh tensors or on what the last call returned."""

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.tanh(x.flip(0)) + y.sum()
        return z.cumsum(0), z[:1]

    fn = STEP.setdefault(device, graphs(step))
    mine = eager = (ones(device, 2, 3), ones(device, 2))
    for which, rows in calls:
        fresh = ones(device, rows, 3) + which
        choices: list[Callable[[Any], tuple[torch.Tensor, torch.Tensor]]] = [
            lambda r, fresh=fresh: (fresh, r[0]), lambda r: (r[0], r[1]), lambda r: (r[1], r[0]),
            lambda r, fresh=fresh: (fresh, fresh[:1]),
        ]  # fmt: skip
        mine, eager = fn(*choices[which](mine)), step(*choices[which](eager))
        torch.testing.assert_close(mine, eager)


STEP: dict[torch.device, Any] = {}
