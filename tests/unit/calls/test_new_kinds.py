"""New kinds of calls that seldom come again: sizes that depend on data, integers that count."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import pygraph
from pygraph.calls import limits
from pygraph.calls.entries import Entry
from pygraph.calls.new_kinds import SELDOM, NewKinds
from pygraph.calls.retries import Budget, Looks
from pygraph.interop import live
from tests.unit.calls.test_retries import Clock, seldom
from tests.unit.calls.test_retries import clock as clock  # a fixture


def step(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2) + 1


def call(fast: object, device: torch.device, *sizes: int) -> None:
    for size in sizes:
        x = torch.arange(float(size), device=device)
        assert torch.equal(fast(x), step(x))  # type: ignore[operator]


@pytest.fixture(autouse=True)
def looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is looked up, however many like it have run as they are."""
    seldom(monkeypatch, lookups=10_000)


def test_sizes_that_never_come_again_are_not_recorded(device: torch.device, clock: Clock) -> None:
    fast = pygraph.jit(step)
    call(fast, device, *range(1, 101))
    assert fast.cache_info().captures == limits.LIMITS.single_kinds
    found = {fallback["reason"]: fallback["count"] for fallback in fast.explain().to_dict()["fallbacks"]}
    assert found[SELDOM.reason] == 100 - limits.LIMITS.single_kinds


def test_kinds_that_are_known_go_on_as_graphs(device: torch.device, clock: Clock) -> None:
    fast = pygraph.jit(step)
    call(fast, device, *range(1, 31))
    hits = fast.cache_info().hits
    call(fast, device, *range(1, 1 + limits.LIMITS.single_kinds))
    assert fast.cache_info().hits == hits + limits.LIMITS.single_kinds


def test_sizes_that_come_again_are_all_recorded(
    device: torch.device, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty lengths, again and again: each has a graph when its calls have taken as long as a recording takes."""
    seldom(monkeypatch, late_kind_share=1e-9)
    fast = pygraph.jit(step)
    single = limits.LIMITS.single_kinds
    call(fast, device, *range(1, 21))
    assert fast.cache_info().captures == single
    for _ in range(30):
        call(fast, device, *range(1, 21))
    assert fast.cache_info().captures == 20


def test_new_sizes_are_recorded_at_once_while_others_come_again(device: torch.device, clock: Clock) -> None:
    fast = pygraph.jit(step)
    count = 3 * limits.LIMITS.single_kinds
    for size in range(1, count + 1):
        clock.now += 1000
        call(fast, device, size, size)
    assert fast.cache_info().captures == count


def test_as_many_that_come_but_once_are_not_recorded(device: torch.device, clock: Clock) -> None:
    """Half of the calls are of new sizes, and the others of sizes that come again, as of a detector's boxes."""
    fast = pygraph.jit(step)
    for n in range(200):
        call(fast, device, 1 + n % 16, 100 + n)
    assert fast.cache_info().captures <= 16 + limits.LIMITS.single_kinds
    assert fast.cache_info().hits >= 100


def kinds_of(budget: Budget, seconds: float = 1.0) -> Any:
    """The kinds of a function that has had as many as are compiled in any case."""
    kinds: Any = NewKinds(budget, SELDOM)
    for kind in range(limits.LIMITS.single_kinds):
        assert kinds.wait(kind, []) is None
        kinds.note_compiled(kind, seconds)
    return kinds


def come_again() -> list[Any]:
    """The entries of as many kinds, each of which came again."""
    entries: list[Any] = [Entry(fallbacks=[]) for _ in range(limits.LIMITS.single_kinds)]
    for entry in entries:
        entry.calls = 2
    return entries


def test_a_kind_is_compiled_when_its_calls_have_taken_as_long(clock: Clock) -> None:
    budget = Budget(0, limits.LIMITS.late_kind_share)
    kinds = kinds_of(budget, seconds=0.05)
    budget.lose(1.0)
    for _ in range(60):
        waiting = kinds.wait("late", [])
        if waiting is None:
            break
        with waiting.running():
            clock.now += 0.009  # and a millisecond, as somebody looks
    assert kinds.wait("late", []) is None
    assert waiting is None
    assert kinds.wait("another", []) is not None
    assert 4 <= clock.now / 0.01 <= 7


def test_calls_that_are_not_looked_up_count_as_well(
    device: torch.device, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of calls that run without a lookup, as many are of a kind as of those that are looked up."""
    seldom(monkeypatch, late_kind_share=1e-9, lookups=4, lookup_share=0.01)
    looks: Looks[Any] = Looks()
    for _ in range(limits.LIMITS.lookups):
        assert looks.as_it_is("look", SELDOM, None, 0.001) == 1
    calls = 0
    while looks.is_skipped("look"):
        calls += 1
    assert looks.as_it_is("look", SELDOM, None, 0.001) == 1 + calls > 2
    monkeypatch.setattr(NewKinds, "_usual_seconds", lambda self: 0.1)  # a hundred calls
    fast, single = pygraph.jit(step), limits.LIMITS.single_kinds
    call(fast, device, *range(1, 1 + single), 60, 60)
    assert fast.cache_info().captures == single + 1  # all that the share allows
    for n in range(1500):
        call(fast, device, 50 if n % 2 else 100 + n)
    assert fast.cache_info().captures == single + 2
    hits = fast.cache_info().hits
    call(fast, device, *[50] * 20)
    assert fast.cache_info().hits == hits + 20, "without a lookup"


def test_functions_share_the_time_for_further_kinds(clock: Clock) -> None:
    budget = Budget(0, limits.LIMITS.late_kind_share)
    first, second = kinds_of(budget), kinds_of(budget)
    entries = come_again()
    assert first.wait("at once", entries) is None
    first.note_compiled("at once", 1.0)
    assert second.wait("late", entries) is not None
    assert second.wait("late", entries) is not None
    clock.now += 1.0 / limits.LIMITS.late_kind_share
    assert second.wait("late", entries) is None
    second.note_compiled("late", 1.0)
    assert first.wait("one more", entries) is not None


def test_kinds_that_came_but_once_make_the_next_one_come_again(clock: Clock) -> None:
    kinds = kinds_of(Budget(0, limits.LIMITS.late_kind_share))
    single: list[Any] = [Entry(fallbacks=[]) for _ in range(limits.LIMITS.single_kinds)]
    assert kinds.wait("new", single) is not None
    assert kinds.wait("new", single) is None


def test_a_kind_that_comes_again_is_recorded_for_a_share_of_the_time(device: torch.device, clock: Clock) -> None:
    fast = pygraph.jit(step)
    count = limits.LIMITS.single_kinds
    call(fast, device, *range(1, 101))
    call(fast, device, 50, 51, 52)  # the first of them, and then time has to pass
    assert fast.cache_info().captures == count + 1
    clock.now += 1000
    call(fast, device, 52)
    assert fast.cache_info().captures == count + 2


def test_strict_functions_record_every_kind(device: torch.device, clock: Clock) -> None:
    fast = pygraph.jit(step, strict=True)
    call(fast, device, *range(1, 31))
    assert fast.cache_info().captures == 30


def test_an_integer_that_counts_is_not_recorded_at_every_step(device: torch.device, clock: Clock) -> None:
    x = torch.arange(6.0, device=device)
    fast = pygraph.jit(lambda x, n: x * 2 if n % 3 else x.roll(n))
    for n in range(60):
        assert torch.equal(fast(x, n), x * 2 if n % 3 else x.roll(n))
    # Besides these, the first number and the path that only decides.
    assert fast.cache_info().captures == limits.LIMITS.single_kinds + 2


def test_traces_of_one_kind_are_one_kind(device: torch.device, clock: Clock) -> None:
    """What a function closes over changes, and it is traced again: these are no kinds that came but once."""
    state = {"text": ""}
    fast = pygraph.jit(lambda x: x * 2 if state["text"].startswith("b") else x * len(state["text"]))
    x = torch.arange(6.0, device=device)
    traces = limits.LIMITS.wasted_traces
    for n in range(traces):
        state["text"] = "a" * n
        assert torch.equal(fast(x), x * n)
    assert fast.cache_info().captures == traces
    for size in (5, 4):
        assert torch.equal(fast(x[:size]), x[:size] * (traces - 1))
    assert fast.cache_info().captures == traces + 2


def test_clearing_the_cache_begins_anew(device: torch.device, clock: Clock) -> None:
    fast = pygraph.jit(step)
    call(fast, device, *range(1, 31))
    fast.cache_clear()
    call(fast, device, *range(31, 61))
    assert fast.cache_info().captures == limits.LIMITS.single_kinds


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")  # of Dynamo's, which differ between versions
def test_dynamic_shapes_below_torch_compile(device: torch.device, clock: Clock) -> None:
    """One graph of Dynamo's for all sizes, of which hardly any comes again, as of boxes that a detector finds."""
    counts = live.pool_owner().shared.counts  # of all that torch.compile has compiled in this process
    before = counts.captures, counts.of_calls().hits
    fast = torch.compile(step, backend=pygraph.backend, dynamic=True)
    call(fast, device, *range(2, 32), *[7] * 3)
    assert counts.captures - before[0] <= limits.LIMITS.single_kinds + 1, str(pygraph.explain())
    functions = [function for replay in live.CALLABLES for function in replay.functions()]
    assert max(function.cache_info().hits for function in functions) - before[1] >= 3


@dataclasses.dataclass
class State:
    """A state that a step takes and returns, with a log that grows."""

    step: int
    hidden: torch.Tensor
    log: list[float]


def test_objects_made_anew_with_a_list_that_grows_are_given_up(device: torch.device) -> None:
    def step(x: torch.Tensor, state: State) -> State:
        hidden = (x + state.hidden).tanh()
        return dataclasses.replace(state, step=state.step + 1, hidden=hidden, log=[*state.log, float(state.step)])

    fast = pygraph.jit(step)
    ours = eagers = State(0, torch.zeros(3, device=device), [])
    for _ in range(24):
        x = torch.randn(3, device=device)
        ours, eagers = fast(x, ours), step(x, eagers)
        torch.testing.assert_close(ours.hidden, eagers.hidden)
        assert (ours.step, ours.log) == (eagers.step, eagers.log)
    waited = [note for note in fast.explain().to_dict()["fallbacks"] if "seldom come again" in note["reason"]]
    assert sum(note["count"] for note in waited) >= 8
