"""A user's calls run by graphs or as they are, whichever is faster, as soon as that is known."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest
import torch

from pygraph.calls import comparing, limits, retries
from pygraph.calls.entries import Differentiated
from pygraph.calls.options import Options
from pygraph.calls.pace import Pace
from pygraph.transforms.passes import PASSES
from tests.unit.calls.test_comparing import Driver
from tests.unit.calls.test_retries import Clock

EARLY, LATE = 4, limits.LIMITS.calls_before_comparing


class Case:
    """Calls that take a second by graphs, and another time as they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, as_it_is: float, result: Any = None) -> None:
        self.clock = Clock()
        monkeypatch.setattr(retries, "clock", self.clock)
        monkeypatch.setattr(comparing, "MEASURES", True)
        monkeypatch.setattr(comparing, "driver_for", lambda device: Driver())
        self.seconds = {"graphs": 1.0, "as it is": as_it_is}
        self.ways, self.result, self.compiles = list[str](), result, False
        self.counts = types.SimpleNamespace(compilations=1, calls=0, note_as_it_is=lambda: None)
        self.entries: list[Any] = []
        cache = types.SimpleNamespace(inlined=collections.Counter(), settle=lambda: None, entries=self.entries)
        self.engine: Any = _Engine(self.take)
        self.engine.function = types.SimpleNamespace(options=Options(), passes=PASSES)
        self.engine.shared = types.SimpleNamespace(counts=self.counts, pools={"device": None})
        self.engine.cache, self.engine.family = cache, lambda: [self.engine]
        self.pace = Pace(self.engine)

    def take(self, way: str) -> Any:
        self.clock.now += self.seconds[way]
        self.ways.append(way)
        self.counts.compilations += self.compiles and way == "graphs"
        return self.result

    def call(self, times: int, *, compiled: bool = False) -> list[str]:
        before, self.compiles = len(self.ways), compiled
        for _ in range(times):
            if self.pace.watches:
                self.pace.run((), {})
            else:
                self.take("graphs")
        return self.ways[before:]


class _Engine:
    def __init__(self, take: Any) -> None:
        self.take = take

    def __call__(self) -> Any:
        return self.take("graphs")

    def fn(self) -> Any:
        return self.take("as it is")


EARLY_TURNS = ["graphs"] * (EARLY + 4) + ["as it is"] * 4
LATE_TURNS = (["graphs"] * 4 + ["as it is"] * 4) * 2


def test_what_takes_much_longer_by_graphs_soon_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.3)
    assert case.call(len(EARLY_TURNS)) == EARLY_TURNS
    assert set(case.call(limits.LIMITS.calls_between_comparisons)) == {"as it is"}
    assert sum(case.engine.cache.inlined.values()) == limits.LIMITS.calls_between_comparisons
    case.seconds["graphs"] = 0.2  # it is found out again
    assert case.call(len(EARLY_TURNS)) == EARLY_TURNS
    assert case.call(LATE - EARLY)[-1] == "graphs"


@pytest.mark.parametrize(("as_it_is", "way"), [(0.8, "as it is"), (0.95, "graphs"), (2.0, "graphs")])
def test_smaller_differences_are_looked_for_later(monkeypatch: pytest.MonkeyPatch, as_it_is: float, way: str) -> None:
    case = Case(monkeypatch, as_it_is)
    assert case.call(len(EARLY_TURNS)) == EARLY_TURNS
    assert set(case.call(LATE - EARLY)) == {"graphs"}
    assert case.call(len(LATE_TURNS)) == LATE_TURNS
    assert set(case.call(100)) == {way}
    assert case.pace.watches == (way == "as it is")


def test_calls_that_are_as_short_as_launches_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.1)
    program = types.SimpleNamespace(nodes=range(1000))
    monkeypatch.setattr("pygraph.calls.pace.count_kernels", len)
    entry = types.SimpleNamespace(calls=0, program=program)
    case.entries.append(entry)
    case.seconds["graphs"] = 0.001
    for _ in range(EARLY):
        case.call(1)
        entry.calls += 1
    assert not case.pace.watches
    assert set(case.ways) == {"graphs"}


def test_a_function_that_comes_to_no_rest_runs_as_it_is_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.01)
    assert case.call(16, compiled=True) == ["graphs"] * 16
    begin = case.clock.now
    while case.ways[-16:] != ["graphs"] * 16 or case.clock.now < begin + 10:
        case.call(1, compiled=True)
    assert case.clock.now - begin > 16 / limits.LIMITS.restless_share


def test_a_function_that_is_compiled_often_and_slower_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.9)
    assert case.call(60, compiled=True).count("as it is") == 12


def test_compilations_now_and_then_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.01)
    for call in range(24):
        case.call(1, compiled=call % 3 == 0)
    assert case.ways[-1] == "as it is"


def test_few_calls_that_take_long_count_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.01)
    case.seconds["graphs"] = 10.0
    assert case.call(12, compiled=True) == ["graphs"] * 6 + ["as it is"] * 6


def test_a_call_whose_backward_is_a_graph_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.1, torch.ones(2, requires_grad=True))
    case.entries.append(Differentiated(fallbacks=[]))
    assert set(case.call(100)) == {"graphs"}


def test_a_result_with_a_graph_of_autograd_has_to_take_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.7, torch.ones(2, requires_grad=True))
    assert case.call(100)[-1] == "graphs"
    case = Case(monkeypatch, 0.4, torch.ones(2, requires_grad=True))
    assert case.call(100)[-1] == "as it is"


def test_calls_for_which_something_is_compiled_again_are_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 2.0)
    case.call(100)
    assert not case.pace.watches
    case.pace.note_compilations()
    assert not case.pace.watches
    case.counts.compilations += 1
    case.pace.note_compilations()
    assert case.pace.watches
