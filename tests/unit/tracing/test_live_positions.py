"""Views at an int position: one graph for all positions, and results, updates and errors of eager."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph

READ: dict[str, Callable[[Tensor, int], Any]] = {
    "item": lambda x, k: x[k] + 1,
    "of a vector": lambda x, k: x.view(-1)[k] * 2,
    "second": lambda x, k: x[:, k] * 2,
    "last": lambda x, k: x[..., k] * 2,
    "twice": lambda x, k: x[k, :, k] + 1,
    "among others": lambda x, k: x[None, k, 1:, None] - 1,
    "beside a list": lambda x, k: x[torch.tensor([1, 0], device=x.device), k] - 1,
    "slice": lambda x, k: x[:, k : k + 1] * 2,
    "slice of two": lambda x, k: x[k : k + 2].sum(0),
    "select": lambda x, k: x.select(1, k) * 2,
    "narrow": lambda x, k: x.narrow(2, k, 1) * 2,
    "computed": lambda x, k: x[(k + 1) % 4] * x[k // 2],
    "transposed": lambda x, k: x.transpose(0, 2)[:, k] * 2,
    "transposed rows": lambda x, k: x.transpose(1, 2)[k].relu(),
    "of computed": lambda x, k: (x * 2)[k].sum(),
    "a view of it": lambda x, k: x[k].view(-1)[1:] * 2,
    "a matrix": lambda x, k: x[:, k] @ x[k],
    "and a number": lambda x, k: x[k] * k,
    "cloned": lambda x, k: x[k].clone(),
}

WRITE: dict[str, Callable[[Tensor, int, Tensor], Any]] = {
    "item": lambda c, k, v: c.__setitem__(k, v),
    "second": lambda c, k, v: c.__setitem__((slice(None), k), v),
    "number": lambda c, k, v: c.__setitem__((slice(None), k), 3.5),
    "live number": lambda c, k, v: c.__setitem__(k, k),
    "other dtype": lambda c, k, v: c.__setitem__(k, v.double()),
    "broadcast": lambda c, k, v: c.__setitem__((slice(None), k), v[:1]),
    "one more dimension": lambda c, k, v: c.__setitem__(k, v[None]),
    "slice": lambda c, k, v: c.__setitem__((slice(None), slice(k, k + 1)), v[:, None]),
    "among others": lambda c, k, v: c.__setitem__((k, slice(1, 3)), v[:2]),
    "in place": lambda c, k, v: c[:, k].add_(v),
    "copy": lambda c, k, v: c.select(1, k).copy_(v),
    "through a view": lambda c, k, v: c.transpose(0, 1)[k].mul_(2).add_(1),
    "twice": lambda c, k, v: (c.__setitem__(k, v), c.__setitem__((slice(None), k), v)),
    "what is read": lambda c, k, v: c.__setitem__(k, c[(k + 1) % 4]),
}


def outcome(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of a call, or the error that it raises."""
    try:
        return fn(*args)
    except (IndexError, RuntimeError) as error:
        return error


@pytest.mark.parametrize("name", READ)
def test_reading_at_a_position(device: torch.device, name: str) -> None:
    fn, x = READ[name], torch.arange(64.0).view(4, 4, 4).to(device)
    fast = pygraph.jit(fn)
    for k in (1, 2, 0, 1, 2, 0):
        got, expected = fast(x, k), fn(x, k)
        torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=0, atol=0)
        assert got.stride() == expected.stride()
    assert fast.cache_info().captures <= 3
    assert fast.explain().to_dict()["fallbacks"] == []


@pytest.mark.parametrize("name", WRITE)
def test_writing_at_a_position(device: torch.device, name: str, native: bool) -> None:
    values = torch.arange(16.0).view(4, 4).to(device)

    def make() -> tuple[Callable[..., Tensor], Tensor]:
        cache = torch.zeros(4, 4, 4).to(device)

        def fn(v: Tensor, k: int) -> Tensor:
            WRITE[name](cache, k, v)
            return cache.sum(1)

        return fn, cache

    (plain, expected), (fn, got) = make(), make()
    fast = pygraph.jit(fn)
    for k in (1, 2, 0, 3, 2, 1):
        torch.testing.assert_close(fast(values + k, k).cpu(), plain(values + k, k).cpu(), rtol=0, atol=0)
        torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=0, atol=0)
    assert fast.cache_info().captures <= 3
    assert fast.explain().to_dict()["fallbacks"] == []


def test_an_update_writes_one_position(device: torch.device) -> None:
    """The rest of the cache is not copied."""
    cache = torch.zeros(2, 64, 8).to(device)

    def fn(x: Tensor, k: int) -> Tensor:
        cache[:, k] = x
        return x + 1

    fast = pygraph.jit(fn)
    for k in range(6):
        fast(torch.full((2, 8), float(k)).to(device), k)
    assert fast.cache_info().captures == 2
    (row,) = [row for row in fast.explain().to_dict()["entries"] if row["calls"] > 1]
    assert row["kernels"] == 3  # the position, the update and the sum


@pytest.mark.parametrize("name", ["item", "second", "slice", "narrow", "transposed"])
def test_negative_positions_and_those_outside(device: torch.device, name: str) -> None:
    fn, x = READ[name], torch.arange(64.0).view(4, 4, 4).to(device)
    fast = pygraph.jit(fn)
    for k in (1, 2, -1, -4, 3, 4, -5, 7, -2, 0, 5, -1):
        got, expected = outcome(fast, x, k), outcome(fn, x, k)
        assert type(got) is type(expected)
        if isinstance(expected, Tensor):
            torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=0, atol=0)
        else:
            assert str(got) == str(expected)


def test_writing_outside_changes_nothing(device: torch.device) -> None:
    cache = torch.zeros(4, 4).to(device)

    def fn(x: Tensor, k: int) -> Tensor:
        cache[k] = x
        return x * 2

    fast = pygraph.jit(fn)
    for k in (0, 1, 2):
        fast(torch.ones(4).to(device), k)
    before = cache.clone()
    with pytest.raises(IndexError):
        fast(torch.full((4,), 7.0).to(device), 4)
    assert torch.equal(cache, before)
    fast(torch.full((4,), 5.0).to(device), -1)
    assert cache[3].tolist() == [5.0] * 4


def test_a_result_that_is_a_view_is_one(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, k: (x[k], x * 2))
    x = torch.arange(16.0).view(4, 4).to(device)
    for k in (0, 1, 2, 1):
        view, _ = fast(x, k)
        assert view.data_ptr() == x[k].data_ptr()
        view.fill_(float(k))
        assert x[k].tolist() == [float(k)] * 4


def test_a_result_that_is_a_view_of_what_is_computed(device: torch.device) -> None:
    fn = lambda x, k: ((x * 2)[k], x + 1)  # noqa: E731
    fast = pygraph.jit(fn)
    x = torch.arange(16.0).view(4, 4).to(device)
    for k in (0, 1, 2, 1, 3):
        torch.testing.assert_close(fast(x, k), fn(x, k), rtol=0, atol=0)


def test_gradients_at_a_position(device: torch.device) -> None:
    weight = torch.arange(12.0).view(4, 3).to(device).requires_grad_()

    def fn(x: Tensor, k: int) -> Tensor:
        return (weight[k] * x).sum() + (weight[k : k + 1] ** 2).sum()

    fast = pygraph.jit(fn)
    x = torch.arange(3.0).to(device)
    for k in (0, 1, 2, 3, 1):
        gradients = []
        for run in (fn, fast):
            weight.grad = None
            run(x, k).backward()
            assert weight.grad is not None
            gradients.append(weight.grad.cpu())
        torch.testing.assert_close(*gradients)
    assert fast.explain().to_dict()["fallbacks"] == []


def test_gradients_inside(device: torch.device) -> None:
    fn = torch.func.grad(lambda x, k: (x[k] ** 3).sum() * k)
    fast = pygraph.jit(lambda x, k: fn(x, k))
    x = torch.arange(12.0).view(4, 3).to(device)
    for k in (0, 1, 2, 3, 1):
        torch.testing.assert_close(fast(x, k).cpu(), fn(x, k).cpu(), rtol=0, atol=0)
    assert fast.cache_info().captures <= 2


def test_an_expanded_tensor_is_read_as_before(device: torch.device) -> None:
    fn = lambda x, k: x.expand(4, 4)[k] + 1  # noqa: E731
    fast = pygraph.jit(fn)
    x = torch.arange(4.0).to(device)
    for k in (0, 1, 2):
        torch.testing.assert_close(fast(x, k), fn(x, k), rtol=0, atol=0)


def test_decoding_with_several_caches(device: torch.device) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8).to(device) for _ in range(2)]

    def make() -> Callable[..., Tensor]:
        caches = [torch.zeros(2, 16, 8).to(device) for _ in layers]

        @torch.no_grad()
        def step(x: Tensor, pos: int) -> Tensor:
            for layer, cache in zip(layers, caches, strict=True):
                cache[:, pos] = layer(x)
                mask = torch.arange(16, device=x.device) <= pos
                scores = (cache @ x[:, :, None])[..., 0].masked_fill(~mask, -torch.inf)
                x = (scores.softmax(-1)[:, None] @ cache)[:, 0]
            return x

        return step

    plain, fast = make(), pygraph.jit(make())
    x = y = torch.randn(2, 8).to(device)
    for pos in range(10):
        x, y = plain(x, pos), fast(y, pos)
        torch.testing.assert_close(y, x)
    assert fast.cache_info().captures == 2


OF_UNKNOWN_SIZES: dict[str, Callable[[Tensor, int], Any]] = {
    "item": lambda x, k: x[x > 0][k],
    "computed": lambda x, k: x.round().unique()[k % 2],
    "transposed": lambda x, k: (x > 0).nonzero().t().contiguous()[k % 2].sum(),
    "slice": lambda x, k: (x > 0).nonzero()[k:].sum(),
    "column": lambda x, k: (x > 0).nonzero()[:, k % 2].sum(),
    "narrow": lambda x, k: x[x > 0].narrow(0, k % 2, 2) * 2,
    "columns": lambda x, k: x[:, (x[0] > 0).nonzero()[:, 0]][k % 2].sum(),
}


def written(x: Tensor, k: int) -> Tensor:
    y = x[x > 0]
    y[k % 2] = 5.0
    return y.sum()


@pytest.mark.parametrize("name", [*OF_UNKNOWN_SIZES, "written"])
@pytest.mark.parametrize("counts", [False, True])
def test_a_position_in_what_data_decides_the_size_of(device: torch.device, name: str, counts: bool) -> None:
    """An argument, or a counter that the function keeps."""
    fn = OF_UNKNOWN_SIZES.get(name, written)
    count = 0

    def counted(x: Tensor) -> Any:
        nonlocal count
        count += 1
        return fn(x, count % 3)

    fast = pygraph.jit(counted if counts else fn)
    for number in range(6):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(number)).to(device)
        args = (x,) if counts else (x, number % 3)
        got, expected = outcome(fast, *args), outcome(fn, x, (number + 1) % 3 if counts else number % 3)
        assert type(got) is type(expected), (got, expected)
        if isinstance(expected, Tensor):
            assert torch.equal(got, expected)
    assert not counts or count == 6


def _selected(rows: Tensor, k: int, x: Tensor) -> Tensor:
    return rows[k] + x


def _written(rows: Tensor, k: int, x: Tensor) -> Tensor:
    rows[k] = x.sum()
    return rows.sum() + x


def _narrowed(rows: Tensor, k: int, x: Tensor) -> Tensor:
    return rows.narrow(0, k, 2).sum() + x


@pytest.mark.parametrize("use", [_selected, _written, _narrowed], ids=["select", "write", "narrow"])
def test_a_position_that_is_outside_where_the_function_catches_the_error(
    device: torch.device, use: Callable[[Tensor, int, Tensor], Tensor]
) -> None:
    def run(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> list[tuple[list[float], list[float]]]:
        rows = torch.arange(5.0, device=device)

        def step(x: Tensor, k: int) -> Tensor:
            try:
                return use(rows, k, x)
            except (IndexError, RuntimeError):
                return x - 1

        call, x = wrap(step), torch.ones(2, device=device)
        return [(call(x, k).tolist(), rows.tolist()) for k in (0, 1, 2, 3, 7, 4, 8, -9, 3, -2, 9, 1)]

    assert run(pygraph.jit) == run(lambda step: step)


def test_the_end_of_a_sequence_that_the_function_notices_by_an_error(device: torch.device) -> None:
    def run(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> list[tuple[list[float], int, int]]:
        rows, state = torch.arange(5.0, device=device), types.SimpleNamespace(t=0, episodes=0)

        def step(x: Tensor) -> Tensor:
            try:
                row = rows[state.t]
            except IndexError:
                state.t, row = 0, rows[0]
                state.episodes += 1
            state.t += 1
            return row + x

        call, x = wrap(step), torch.ones(2, device=device)
        return [(call(x).tolist(), state.t, state.episodes) for _ in range(14)]

    assert run(pygraph.jit) == run(lambda step: step)
