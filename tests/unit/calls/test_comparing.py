"""Calls with Python between their graphs are compared with the function as it is."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest
import torch

from pygraph.calls import comparing, limits, retries
from pygraph.calls.comparing import Comparison
from pygraph.calls.options import Options
from pygraph.runtime.selecting import SelectionPolicy
from pygraph.transforms.passes import PASSES
from tests.unit.calls.test_retries import Clock


class Driver:
    is_exact = False

    def synchronize(self) -> None:
        pass


class Case:
    """Calls that take a second by graphs, and another time as they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, as_it_is: float, **options: Any) -> None:
        self.clock = Clock()
        monkeypatch.setattr(retries, "clock", self.clock)
        monkeypatch.setattr(comparing, "MEASURES", True)
        monkeypatch.setattr(comparing, "driver_for", lambda device: Driver())
        self.seconds, self.ways = {"graphs": 1.0, "as it is": as_it_is}, list[str]()
        self.result: Any = None
        self.counts = types.SimpleNamespace(traces=1)
        engine: Any = types.SimpleNamespace(
            fn=lambda: self.take("as it is"),
            function=types.SimpleNamespace(options=Options(**options), passes=PASSES),
            shared=types.SimpleNamespace(counts=self.counts, pools={"device": None}),
            cache=types.SimpleNamespace(inlined=collections.Counter()),
        )
        self.engine = engine
        self.comparison = Comparison(engine)

    def take(self, way: str) -> Any:
        self.clock.now += self.seconds[way]
        self.ways.append(way)
        return self.result

    def call(self, times: int) -> list[str]:
        before = len(self.ways)
        for _ in range(times):
            self.comparison.run(lambda args, kwargs: self.take("graphs"), (), {})
        return self.ways[before:]


MEASURED = ["graphs"] * 4 + ["as it is"] * 4 + ["graphs"] * 4 + ["as it is"] * 4


@pytest.mark.parametrize(("as_it_is", "way"), [(0.5, "as it is"), (0.95, "graphs"), (2.0, "graphs")])
def test_the_faster_way_is_taken_if_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, as_it_is: float, way: str
) -> None:
    case = Case(monkeypatch, as_it_is)
    assert case.call(limits.LIMITS.calls_before_comparing) == ["graphs"] * limits.LIMITS.calls_before_comparing
    assert case.call(16) == MEASURED
    assert set(case.call(limits.LIMITS.calls_between_comparisons)) == {way}
    assert sum(case.engine.cache.inlined.values()) == (
        limits.LIMITS.calls_between_comparisons if way != "graphs" else 0
    )
    case.seconds["as it is"] = 1.5 - as_it_is  # it is found out again
    assert case.call(16) == MEASURED


@pytest.mark.parametrize(("as_it_is", "way"), [(0.4, "as it is"), (0.6, "graphs")])
def test_results_with_a_graph_of_autograd_have_to_take_much_longer(
    monkeypatch: pytest.MonkeyPatch, as_it_is: float, way: str
) -> None:
    """Their backward, which graphs may be faster at, comes later."""
    case = Case(monkeypatch, as_it_is)
    case.result = torch.ones(2, requires_grad=True)
    case.call(limits.LIMITS.calls_before_comparing + 16)
    assert set(case.call(8)) == {way}


def test_what_is_still_compiled_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.5)
    for _ in range(20):
        assert set(case.call(limits.LIMITS.calls_before_comparing)) == {"graphs"}
        case.counts.traces += 1


def test_graphs_that_are_recorded_anew_after_calls_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose gradients lie elsewhere after a call that ran as it is."""
    case = Case(monkeypatch, 0.5)
    case.call(limits.LIMITS.calls_before_comparing + 9)
    case.counts.traces += 1
    assert set(case.call(10 * limits.LIMITS.calls_before_comparing)) == {"graphs"}


@pytest.mark.parametrize("options", [{"strict": True}, {"selection": SelectionPolicy(mode="estimate")}])
def test_some_options_do_not_compare(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    assert set(Case(monkeypatch, 0.1, **options).call(100)) == {"graphs"}
