"""Memory by ranges of addresses: storages that others made over the same memory, wherever they begin in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pygraph
from pygraph.calls.keys import overlap_key
from pygraph.errors import ArgumentError
from pygraph.ir.ranges import Ranges, are_disjoint, holder, memory_range, share_memory, sharing, span_of
from pygraph.runtime.devices import driver_for


def alias(tensor: torch.Tensor, start: int = 0, size: int | None = None, dtype: torch.dtype | None = None) -> Any:
    """Elements of a vector in another storage, which begins with the first of them."""
    part = tensor[start : None if size is None else start + size]
    part = part if dtype is None else part.view(dtype)
    if tensor.device.type != "emu":
        return torch.from_dlpack(part)
    driver = driver_for(tensor.device)
    assert driver is not None
    return driver.tensor_at(part.data_ptr(), tuple(part.shape), tuple(part.stride()), part.dtype)


def vector(device: Any, size: int = 8) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + size, device=device)


# ---- ranges --------------------------------------------------------------------------------------------------------


def test_a_range_is_that_of_the_storage(device: torch.device) -> None:
    x = vector(device)
    assert memory_range(x[2:4]) == (x.data_ptr(), x.data_ptr() + 32)
    other = alias(x, 2, 3)
    assert other.untyped_storage()._cdata != x.untyped_storage()._cdata
    assert memory_range(other) == (x.data_ptr() + 8, x.data_ptr() + 20)
    assert share_memory(x, other)
    assert not share_memory(alias(x, 0, 2), other)
    assert span_of([other, x[1:3]]) == (x.data_ptr() + 4, x.data_ptr() + 20)
    assert holder([other, x], span_of([x[:1], other])) is x
    assert holder([other], span_of([x[:1], other])) is None


def test_what_has_no_memory_shares_none(device: torch.device) -> None:
    x = vector(device)
    freed = vector(device)
    freed.untyped_storage().resize_(0) if device.type == "cuda" else None
    for other in (x[:0], x[3:3], torch.empty(4, device="meta")):
        assert memory_range(other) == (0, 0)
        assert not share_memory(x, other)
        assert not share_memory(other, other)
        assert not Ranges([x]).meet(other)
        assert not Ranges([other]).pairs
        assert overlap_key([x, other, other]) == ()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=7))
def test_groups_are_what_overlaps_directly_or_through_others(places: list[tuple[int, int]]) -> None:
    memory = np.zeros(64, np.uint8)
    tensors = [torch.from_numpy(memory[start : start + size]) for start, size in places]
    parent = list(range(len(places)))
    for (i, a), (j, b) in itertools.combinations(enumerate(places), 2):
        if set(range(a[0], sum(a))) & set(range(b[0], sum(b))):
            old, new = parent[j], parent[i]
            parent = [new if p == old else p for p in parent]
    expected = [[i for i, p in enumerate(parent) if p == root] for root in dict.fromkeys(parent)]
    expected = [group for group in expected if len(group) > 1]
    assert sharing(enumerate(tensors)) == expected
    assert are_disjoint(tensors) == (not expected) or not all(size for _, size in places)
    assert not (are_disjoint(tensors) and expected)
    assert bool(overlap_key(tensors)) == bool(expected)
    half = len(places) // 2
    owned = Ranges(tensors[:half])
    assert owned.pairs == sorted(owned.pairs)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(owned.pairs))
    for tensor in tensors[half:]:
        assert owned.meet(tensor) == any(share_memory(tensor, other) for other in tensors[:half])


def test_the_key_says_how_foreign_memory_is_shared(device: torch.device) -> None:
    x, y = vector(device), vector(device)
    assert overlap_key([x, y]) == ()
    assert overlap_key([x, alias(x)]) == overlap_key([x, x[:]])
    assert overlap_key([x, alias(x, 2)]) == overlap_key([x, x[2:]])
    assert overlap_key([alias(x, 2), x]) == overlap_key([x[2:], x])
    assert overlap_key([alias(x, 0, 4), alias(x, 4)]) == ()
    assert overlap_key([alias(x, 0, 4), alias(x, 2, 4)]) != overlap_key([x[:4], x[2:6]]), "no storage holds both"
    assert overlap_key([alias(x, 0, 4), alias(x, 4), y[:4], y[4:]]) != ()


# ---- calls ---------------------------------------------------------------------------------------------------------


def between(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    result = b * 2
    a.mul_(3)
    return result


def into_second(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b.mul_(2)
    a.sub_(1)
    return a.sum() + b


def as_it_is(fn: Callable[..., Any]) -> Any:
    return pygraph.devicify(fn)


def graphs(fn: Callable[..., Any]) -> Any:
    return pygraph.graphify(pygraph.indirect(pygraph.devicify(fn)))


U = 64  # elements in 256 bytes: all is equally aligned, so that nothing but sharing tells calls apart

CALLS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "apart": lambda x: (x[: 6 * U], x.flip(0)[: 6 * U]),
    "a view": lambda x: (x[: 6 * U], x[2 * U : 8 * U]),
    "same base": lambda x: (x[: 6 * U], alias(x, 0, 6 * U)),
    "other base": lambda x: (x[: 6 * U], alias(x, 2 * U, 6 * U)),
    "other base, first": lambda x: (alias(x, 2 * U, 6 * U), x[: 6 * U]),
    "both foreign": lambda x: (alias(x, 0, 8 * U)[: 6 * U], alias(x, 2 * U, 6 * U)),
    "none holds all": lambda x: (alias(x, 0, 6 * U), alias(x, 2 * U, 6 * U)),
    "foreign and apart": lambda x: (alias(x, 0, 6 * U), alias(x, 8 * U, 6 * U)),
}
ORDERS = {
    "alias last": list(CALLS),
    "alias first": list(reversed(CALLS)),
    "in turn": ["other base", "apart", "same base", "a view", "apart", "other base, first", "none holds all", "a view"],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("fn", [between, into_second])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wrap", [pygraph.jit, graphs, as_it_is])
@pytest.mark.parametrize("times", [1, 4])
def test_foreign_aliases_in_any_order(
    device: torch.device, wrap: Callable[..., Any], order: str, fn: Callable[..., Any], times: int
) -> None:
    check_order(device, wrap, ORDERS[order], fn, times)


@pytest.mark.parametrize("fn", [between, into_second])
@pytest.mark.parametrize("order", ORDERS)
def test_foreign_aliases_on_the_host(order: str, fn: Callable[..., Any]) -> None:
    check_order("cpu", as_it_is, ORDERS[order], fn, 2)


def check_order(device: Any, wrap: Callable[..., Any], order: list[str], fn: Callable[..., Any], times: int) -> None:
    function = wrap(fn)
    for name in order:
        for _ in range(times):
            x, reference = vector(device, 16 * U), vector(device, 16 * U)
            expected = fn(*CALLS[name](reference))
            got = function(*CALLS[name](x))
            assert torch.equal(got, expected), name
            assert torch.equal(x, reference), name


def test_what_no_storage_holds_runs_as_ordinary_launches(device: torch.device) -> None:
    function = graphs(between)
    x = vector(device, 16 * U)
    function(*CALLS["none holds all"](x))
    reasons = [fallback["reason"] for fallback in function.explain().to_dict()["fallbacks"]]
    assert any("none holds all" in reason for reason in reasons)


def test_a_chain_of_overlapping_storages(device: torch.device) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        d.add_(1)
        a.mul_(2)
        return (c * 3 + b).clone()

    function = graphs(fn)
    for _ in range(3):
        x, reference = vector(device), vector(device)
        got = function(alias(x, 4), alias(x, 2, 4), alias(x, 0, 4), x)
        assert torch.equal(got, fn(alias(reference, 4), alias(reference, 2, 4), alias(reference, 0, 4), reference))
        assert torch.equal(x, reference)


@pytest.mark.parametrize("size", [13, 16])
def test_foreign_memory_seen_as_another_dtype(device: torch.device, size: int) -> None:
    """Regression: fakes of another dtype were given memory of their own where the bytes were no multiple of it."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.zero_()
        return b + 1

    for make in (
        lambda m: (m[:size], m[:8].view(torch.float32)),
        lambda m: (m[:size], alias(m, 0, 8, torch.float32)),
    ):
        function = graphs(fn)
        for _ in range(2):
            memory = torch.full((16,), 3, dtype=torch.uint8, device=device)
            assert function(*make(memory)).tolist() == [1.0, 1.0]


def test_results_that_are_views_of_foreign_memory(device: torch.device) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a.add_(1)
        return a[1:], b[:2]

    function = graphs(fn)
    for name in ("other base", "a view", "other base, first", "same base", "none holds all"):
        x, reference = vector(device, 16 * U), vector(device, 16 * U)
        results, expected = function(*CALLS[name](x)), fn(*CALLS[name](reference))
        for got, wanted in zip(results, expected, strict=True):
            assert torch.equal(got, wanted)
            assert got.data_ptr() - x.data_ptr() == wanted.data_ptr() - reference.data_ptr()


# ---- what is closed over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [pygraph.jit, graphs, as_it_is])
@pytest.mark.parametrize("start", [0, 2 * U])
@pytest.mark.parametrize("first", ["apart", "alias"])
def test_an_alias_of_a_captured_tensor_that_is_written(
    device: torch.device, wrap: Callable[..., Any], start: int, first: str
) -> None:
    def make() -> tuple[torch.Tensor, Any]:
        state = vector(device, 8 * U)

        def fn(x: torch.Tensor) -> torch.Tensor:
            state.add_(1)
            y = x * 2
            state.mul_(2)
            return y

        return state, fn

    state, fn = make()
    reference, eager = make()
    function = wrap(fn)
    order = ["apart", "apart", "apart", "alias", "alias", "apart"]
    for name in order if first == "apart" else reversed(order):
        if name == "apart":
            got, expected = function(vector(device, 6 * U)), eager(vector(device, 6 * U))
        else:
            got, expected = function(alias(state, start, 6 * U)), eager(alias(reference, start, 6 * U))
        assert torch.equal(got, expected)
        assert torch.equal(state, reference)


@pytest.mark.parametrize("start", [0, 2])
def test_captured_aliases_of_each_other(device: torch.device, start: int) -> None:
    def make() -> Any:
        state = vector(device)
        other = alias(state, start)

        def fn(x: torch.Tensor) -> torch.Tensor:
            state.add_(x)
            return other * 2

        return fn

    function, eager = graphs(make()), make()
    x = torch.ones((), device=device)
    for _ in range(3):
        assert torch.equal(function(x), eager(x))


def test_a_captured_tensor_that_was_moved_onto_an_argument(device: torch.device) -> None:
    def make() -> tuple[torch.Tensor, Any]:
        state = vector(device)

        def fn(x: torch.Tensor) -> torch.Tensor:
            state.add_(1)
            return x * 2

        return state, fn

    x, y = vector(device), vector(device)
    state, fn = make()
    reference, eager = make()
    function = as_it_is(fn)
    assert torch.equal(function(x), eager(y))
    state.data, reference.data = x, y
    for _ in range(2):
        assert torch.equal(function(x), eager(y))
        assert torch.equal(x, y)


def test_compiled_functions_refuse_what_they_were_not_compiled_for(device: torch.device) -> None:
    x, state = vector(device), vector(device)
    compiled = pygraph.jit(between).lower(x, vector(device)).compile()
    with pytest.raises(ArgumentError, match="share memory otherwise"):
        compiled(x, alias(x))

    def fn(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x * 2

    compiled = pygraph.jit(fn).lower(x).compile()
    before = state.clone()
    for bad in (state, alias(state)):
        with pytest.raises(ArgumentError, match="shares memory with a captured tensor"):
            compiled(bad)
    assert torch.equal(state, before)


def test_a_foreign_alias_of_reused_memory(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([x, x[:U]]) * 2, x.flip(0)  # the second is read after the first is written

    for start in (0, U):
        function = pygraph.graphify(pygraph.indirect(pygraph.devicify(fn)), reuse_outputs=True)
        for _ in range(2):
            first, _ = function(vector(device, 2 * U))
            part = alias(first, start, 2 * U)
            expected = fn(part)
            for got, wanted in zip(function(part), expected, strict=True):
                assert torch.equal(got, wanted)
