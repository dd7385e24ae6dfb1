"""Functions that remember what they have computed: one call fills the memo, the next ones are graphs."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph.calls import limits, retries
from tests.fakes import assert_no_fake_left
from tests.unit.calls.test_retries import Clock
from tests.unit.tracing.test_leaks import Node, chain, last

pytestmark = [pytest.mark.rotates, pytest.mark.heap]

Tensor = torch.Tensor
Remembering = Callable[[torch.device], Callable[[int], Tensor]]


def by_lru_cache(device: torch.device) -> Callable[[int], Tensor]:
    """Behind functools.lru_cache."""

    @functools.lru_cache
    def positions(n: int) -> Tensor:
        return torch.arange(n, device=device) * 1.0

    return positions


def by_dict(device: torch.device) -> Callable[[int], Tensor]:
    """In a dict."""
    found: dict[int, Tensor] = {}

    def positions(n: int) -> Tensor:
        if n not in found:
            found[n] = torch.arange(n, device=device) * 1.0
        return found[n]

    return positions


def by_unknown_dict(device: torch.device) -> Callable[[int], Tensor]:
    """In a dict that the walk over what a function reaches does not find."""
    found: dict[int, Tensor] = {}
    get, put = found.get, found.setdefault

    def positions(n: int) -> Tensor:
        known = get(n)
        return put(n, torch.arange(n, device=device) * 1.0) if known is None else known

    return positions


ALL = pytest.mark.parametrize("remembering", [by_lru_cache, by_dict, by_unknown_dict])


@ALL
def test_another_shape_fills_the_memo_once_more_and_is_a_graph(device: torch.device, remembering: Remembering) -> None:
    positions = remembering(device)
    fast = pygraph.jit(lambda x: x + positions(x.shape[0]))
    for size in (3, 4, 3, 5, 4, 3):
        for value in (1.0, 2.0, 3.0, 4.0):
            assert fast(torch.full((size,), value, device=device)).tolist() == [value + i for i in range(size)]
    misses = fast.cache_info().misses
    for size in (3, 4, 5):
        assert fast(torch.zeros(size, device=device)).tolist() == list(range(size))
    assert fast.cache_info().misses == misses
    assert "no fallbacks" in str(fast.explain())
    assert_no_fake_left()


@ALL
def test_a_key_of_a_number_that_decides(device: torch.device, remembering: Remembering) -> None:
    positions = remembering(device)
    fast = pygraph.jit(lambda x, n: x + positions(n)[-1])
    x = torch.zeros(3, device=device)
    for n in (2, 3, 4) * 3:
        assert fast(x, n).tolist() == [n - 1.0] * 3
    assert "no fallbacks" in str(fast.explain())
    assert_no_fake_left()


@ALL
def test_a_key_of_a_number_under_autograd(device: torch.device, remembering: Remembering) -> None:
    positions = remembering(device)
    fast = pygraph.jit(lambda x, n: x * positions(n)[-1])
    counts: list[int] = []
    for n in (2, 3, 4) * 3:
        x = torch.ones(3, device=device, requires_grad=True)
        fast(x, n).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [n - 1.0] * 3
        counts.append(sum(note["count"] for note in fast.explain().to_dict()["fallbacks"]))
    assert counts[-1] <= counts[2] <= 3  # calls that fill it
    assert_no_fake_left()


def test_a_memo_that_grows_under_autograd_is_given_up(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(retries, "clock", clock)
    monkeypatch.setattr(retries, "cpu_clock", clock)
    # Each trace takes half a second, as all objects are searched for what it has left.
    monkeypatch.setattr(limits, "LIMITS", dataclasses.replace(limits.LIMITS, outdated_traces=6))
    kept: list[Tensor] = []
    append = kept.append
    traced = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal traced
        traced += type(x) is not Tensor
        append(x.detach() * 2)
        return x * 2

    fast = pygraph.jit(fn)
    for count in range(1, 16):
        x = torch.ones(3, device=device, requires_grad=True)
        fast(x).sum().backward()
        assert len(kept) == count
    assert traced < 2 * limits.LIMITS.outdated_traces
    before = traced
    for _ in range(20):
        fast(torch.ones(3, device=device, requires_grad=True))
    assert traced == before
    kept.clear()
    assert_no_fake_left()


@pytest.mark.parametrize("place", ["lru_cache", "dict", "list"])
def test_a_memo_that_grows_at_every_call_is_given_up(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    clock = Clock()
    monkeypatch.setattr(retries, "clock", clock)
    monkeypatch.setattr(retries, "cpu_clock", clock)
    traced = 0
    steps: list[int] = [0]
    results: dict[int, Tensor] = {}
    found: list[Tensor] = []
    append = found.append

    @functools.cache
    def remembered(step: int) -> Tensor:
        return torch.full((3,), float(step), device=device)

    def fn(x: Tensor) -> Tensor:
        nonlocal traced
        traced += type(x) is not Tensor
        step = steps[0]
        steps[0] += 1
        if place == "lru_cache":
            return x + remembered(step)
        results[step] = y = x + step
        if place == "list":
            append(y)
        return y

    fast = pygraph.jit(fn)
    x = torch.zeros(3, device=device)
    calls = 4 * limits.LIMITS.outdated_traces
    for step in range(calls):
        assert fast(x).tolist() == [float(step)] * 3
    assert steps == [calls]
    assert traced < 2 * limits.LIMITS.outdated_traces
    assert_no_fake_left()
    before = traced
    for step in range(calls, calls + 20):
        assert fast(x).tolist() == [float(step)] * 3
    assert traced == before
    report = fast.explain().to_dict()
    assert report["fallbacks"] or report["in_python"]


def test_what_is_too_much_to_be_looked_at_is_reported(device: torch.device) -> None:
    first = chain(7)
    last(first).last = [[Node() for _ in range(1500)] for _ in range(16)]

    @functools.cache
    def table(n: int) -> Tensor:
        return torch.arange(n, device=device) * 1.0

    fast = pygraph.jit(lambda x: x + table(3) * (first.count + 1))
    for _ in range(3):
        assert fast(torch.zeros(3, device=device)).tolist() == [0.0, 1.0, 2.0]
    assert "is too much to be looked at" in " ".join(str(fast.explain()).split())
    assert_no_fake_left()


# ---- collections while a function is traced ----------------------------------------------------------------------


@pytest.fixture
def frozen() -> Iterator[None]:
    """Objects that the user has frozen."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("generations", [(), (0,), (1,), (2,), (2, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("bound", [None, 8])
def test_nothing_is_taken_out_of_a_result_when_garbage_was_collected(
    device: torch.device, frozen: None, generations: tuple[int, ...], bound: int | None
) -> None:
    del frozen

    @functools.lru_cache(maxsize=bound)
    def tables(n: int) -> dict[str, Any]:
        made: dict[str, Any] = {"all": torch.arange(n, device=device) * 1.0}
        made["first"] = [made["all"][:1]]
        for generation in generations:
            gc.collect(generation)
        return made

    def fn(x: Tensor) -> Tensor:
        found = tables(3)
        return x + found["all"] + found["first"][0]

    fast = pygraph.jit(fn)
    for value in (1.0, 2.0, 3.0, 4.0):
        assert fast(torch.full((3,), value, device=device)).tolist() == [value + i for i in range(3)]
    assert "no fallbacks" in str(fast.explain())
    assert [tables(3)["all"].tolist(), tables(3)["first"][0].tolist()] == [[0.0, 1.0, 2.0], [0.0]]
    assert_no_fake_left()


def test_what_was_there_stays_when_garbage_was_collected(device: torch.device, frozen: None) -> None:
    del frozen
    kept: list[Any] = [1]
    append = kept.append
    kept.append({"old": [2]})

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        gc.collect()
        append([y, [y]])
        gc.collect()
        return y

    fast = pygraph.jit(fn)
    for count in range(1, 4):
        assert fast(torch.ones(3, device=device)).tolist() == [2.0] * 3
        assert kept[:2] == [1, {"old": [2]}]
        assert [entry[1][0].tolist() for entry in kept[2:]] == [[2.0] * 3] * count
    assert_no_fake_left()


def test_control_flow_in_a_memo(device: torch.device, frozen: None) -> None:
    """Dynamo, which compiles its branches, collects garbage."""
    del frozen

    @functools.lru_cache
    def tables(n: int) -> dict[str, Tensor]:
        made = {"all": torch.arange(n, device=device) * 1.0}
        flag = made["all"].sum() > 0
        made["chosen"] = torch.cond(flag, lambda t: t + 1, lambda t: t - 1, (made["all"],))
        return made

    def fn(x: Tensor) -> Tensor:
        return x + tables(3)["chosen"]

    fast = pygraph.jit(fn)
    with torch.no_grad():
        for _ in range(3):
            assert fast(torch.zeros(3, device=device)).tolist() == [1.0, 2.0, 3.0]
    assert tables(3)["all"].tolist() == [0.0, 1.0, 2.0]
    torch._dynamo.reset()  # which keeps those of what it has compiled
    assert_no_fake_left()


def remembered_list() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A list that a call changes, beside a tensor, for which the first call runs as it is."""

    @functools.cache
    def history(start: int) -> list[int]:
        return [start]

    @functools.lru_cache(maxsize=4)
    def average(size: int, device: torch.device) -> Tensor:
        return torch.zeros(size, device=device)

    def fn(x: Tensor) -> Tensor:
        history(0).append(len(history(0)))
        average(len(x), x.device).mul_(0.5).add_(x)
        return average(len(x), x.device) + len(history(0))

    return fn, lambda: list(history(0))


def remembered_list_of_few() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A list of a function that forgets."""

    @functools.lru_cache(maxsize=2)
    def history(size: int) -> list[int]:
        return [size]

    def fn(x: Tensor) -> Tensor:
        for start in (*range(len(x)), 0):
            history(start).append(len(history(start)))
        if x.sum() > 3:
            history(0).append(7)
        return x + len(history(0))

    return fn, lambda: (history.cache_info().currsize, list(history(0)))


def counted_inside() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A function that counts how often it computes something."""
    count = 0

    @functools.lru_cache
    def doubled(number: int) -> int:
        nonlocal count
        count += 1
        return 2 * number

    return lambda x: x + doubled(x.shape[0]), lambda: count


def counted_in_a_step() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """The same, where calls change other numbers as well."""
    counts = {"steps": 0, "computed": 0}

    @functools.lru_cache
    def doubled(number: int) -> int:
        counts["computed"] += 1
        return 2 * number

    def fn(x: Tensor) -> Tensor:
        counts["steps"] += 1
        return x + doubled(x.shape[0]) * counts["steps"]

    return fn, lambda: dict(counts)


def remembered_value() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """A number that is another one afterwards, of which nothing is noticed."""
    factors = [2.0]

    @functools.lru_cache
    def factor() -> float:
        return factors[0]

    def left() -> float:
        factors[0] += 1
        return factors[0]

    return lambda x: x * factor(), left


def remembered_object() -> tuple[Callable[[Tensor], Tensor], Callable[[], Any]]:
    """An object whose attribute a call changes."""

    @functools.cache
    def node(key: str) -> Node:
        return Node(key)

    def fn(x: Tensor) -> Tensor:
        node("a").count += 1
        return x * node("a").count

    return fn, lambda: node("a").count


@pytest.mark.parametrize(
    "make",
    [
        remembered_list,
        remembered_list_of_few,
        counted_inside,
        counted_in_a_step,
        remembered_value,
        remembered_object,
    ],
)
def test_what_is_changed_of_what_is_remembered_is_changed_once(
    device: torch.device, make: Callable[[], tuple[Callable[[Tensor], Tensor], Callable[[], Any]]]
) -> None:
    (fn, left), (eager, expected) = make(), make()
    fast = pygraph.jit(fn)
    for number in range(6):
        x = torch.full((3 + number % 2,), float(number), device=device)
        assert torch.equal(fast(x.clone()), eager(x)), number
        assert left() == expected(), number


@pytest.mark.parametrize("maxsize", [None, 8])
def test_a_key_that_the_device_decides(device: torch.device, maxsize: int | None) -> None:
    """After a trace, nobody knows any more what such a key is equal to."""

    @functools.lru_cache(maxsize)
    def scale(size: int, *, is_large: bool) -> Tensor:
        return torch.full((size,), 2.0 if is_large else 1.0, device=device)

    @functools.lru_cache(maxsize)
    def double(value: float) -> float:
        return value * 2

    def fn(x: Tensor) -> Tensor:
        return x * scale(x.shape[0], is_large=x[0].item() > 0) * scale(x.shape[0], is_large=x[1].item() > 0)

    def of_number(x: Tensor) -> Tensor:
        return x * double(x[0].item())

    for one in (fn, of_number):
        fast = pygraph.jit(one)
        for first in (1.0, -1.0, 2.0, -2.0, 1.0, 3.0, -1.0):
            x = torch.tensor([first, 1.0, -first], device=device)
            assert fast(x).tolist() == one(x).tolist()
    assert_no_fake_left()
