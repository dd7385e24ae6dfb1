"""select: each way is picked when a timer says that it is the fastest."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pygraph
from pygraph.calls.measuring import example_leaves, measured_program
from pygraph.errors import ArgumentError, StageError
from pygraph.ir.selections import Candidate, Compared, Selection
from pygraph.runtime import executable, selecting
from pygraph.runtime.devices import driver_for
from pygraph.runtime.discovery import RefusedError
from pygraph.runtime.samples import Sample
from pygraph.runtime.selecting import SelectionPolicy
from pygraph.transforms.select import select_program

WAYS = ("launch", "patch", "copy")


class Clock:
    """A timer that runs what it is given, and by which one way is the fastest."""

    def __init__(self, fastest: str) -> None:
        self.times = {way: 10.0 if way == fastest else 20.0 for way in WAYS}
        self.asked = collections.Counter[str]()

    def __call__(self, run: Any) -> float:
        run()
        self.asked[run.way] += 1
        return self.times.get(run.way, 20.0)


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(6.0, device=device).view(2, 3)


def step(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2) + 1


@pytest.mark.parametrize("way", WAYS)
def test_the_fastest_way_is_kept(x: torch.Tensor, way: str) -> None:
    clock = Clock(way)
    fn = pygraph.select(pygraph.graphify(pygraph.indirect(step)), timer=clock)
    held = [fn(x + n) for n in range(3)]
    for n, result in enumerate(held):
        assert torch.equal(result, step(x + n))
    assert clock.asked.keys() >= set(WAYS)
    report = fn.explain().to_dict()
    (region,) = report["regions"]
    assert region["way"] == way
    assert {name: region["times_us"][name] for name in WAYS} == clock.times
    assert region["selection"]["lead"] == (10.0, 10.0)
    assert region["selection"]["confidence"] > 0.98
    assert (report["bytes_copied_per_replay"] > 0) == (way == "copy")
    assert (report["kernels_in_graphs"] > 0) == (way != "launch")


def test_copies_are_not_tried_where_the_device_is_slower_than_the_host(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selecting, "worth", lambda gain_us: math.inf)
    many = pygraph.jit(lambda x: functools.reduce(lambda x, n: x.sin() + n, range(200), x))
    many(x)
    few = pygraph.jit(step)
    few(x)
    times = [fn.explain().to_dict()["regions"][0]["times_us"] for fn in (many, few)]
    assert [("copy" in one) for one in times] == [False, True]


def test_copies_are_not_tried_where_that_takes_longer_than_they_may_gain(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(driver_for(x.device)), "is_exact", False)
    for seconds, ways in ((0.0, {"launch", "patch"}), (math.inf, {"launch", "patch", "copy"})):
        monkeypatch.setattr(selecting, "worth", lambda gain_us, seconds=seconds: seconds)
        fn = pygraph.jit(step)
        assert torch.equal(fn(x), step(x))
        (region,) = fn.explain().to_dict()["regions"]
        assert ways <= set(region["times_us"])
        assert ("copy" in ways) == ("copy" in region["times_us"])


def test_copies_that_are_refused_are_no_way(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    original = executable.RegionGraph

    def refusing(*args: Any) -> Any:
        if "copy" in args:
            raise RefusedError(None, "not today")
        return original(*args)

    monkeypatch.setattr(executable, "RegionGraph", refusing)
    fn = pygraph.select(pygraph.graphify(pygraph.indirect(step)), timer=Clock("patch"))
    assert torch.equal(fn(x), step(x))
    report = fn.explain().to_dict()
    (region,) = report["regions"]
    assert region["way"] == "patch"
    assert "copy" not in region["times_us"]
    assert "not today" in [fallback["reason"] for fallback in report["fallbacks"]]


def test_all_launches_run_the_function_itself(x: torch.Tensor) -> None:
    calls: list[Any] = []

    @pygraph.jit
    def plain(x: torch.Tensor) -> torch.Tensor:
        return step(x)

    fn = pygraph.select(pygraph.graphify(pygraph.indirect(step)), timer=Clock("launch"))
    fn(x)
    (entry,) = fn.engine.cache.entries
    assert entry.executable is None
    assert entry.program is None
    assert calls == []
    assert torch.equal(plain(x), fn(x))


@pytest.mark.parametrize("way", WAYS)
def test_on_a_program(x: torch.Tensor, way: str) -> None:
    cut = pygraph.graphify(pygraph.indirect(pygraph.trace(step)(x)))
    text = str(cut)
    chosen = measured_program(cut, policy=SelectionPolicy(timer=Clock(way)))
    assert str(cut) == text
    assert chosen.regions[0].way == way
    assert chosen.history[-1] == "select"
    assert torch.equal(pygraph.evaluate(chosen, x), step(x))


def test_measuring_changes_nothing(x: torch.Tensor) -> None:
    weight = torch.ones(3, device=x.device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        weight.add_(1)
        x.mul_(2)
        return x + torch.rand_like(x) * weight

    fast = pygraph.select(pygraph.graphify(pygraph.indirect(fn)))
    mine = x.clone()
    torch.manual_seed(0)
    got = fast(mine)
    assert weight.tolist() == [2.0] * 3
    weight.fill_(1)
    torch.manual_seed(0)
    assert torch.equal(got, fn(x.clone()))
    assert torch.equal(mine, x * 2)


def test_example_leaves_fit(x: torch.Tensor) -> None:
    program = pygraph.trace(lambda p, k, i: p["w"][i] * k)({"w": x}, 2.0, torch.tensor([0, 1], device=x.device))
    leaves = example_leaves(program)
    assert leaves[0].shape == x.shape
    assert leaves[1] == 1.0
    assert leaves[2].tolist() == [0, 0]


def test_an_uncut_program_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(StageError, match=r"Apply graphify first: select\(graphify\(p\)\)"):
        pygraph.select(pygraph.trace(step)(x))


def test_choosing_is_a_function_of_regions_and_selections(x: torch.Tensor) -> None:
    cut = pygraph.graphify(pygraph.indirect(pygraph.trace(step)(x)))
    text = str(cut)
    launch, patch = Candidate("launch"), Candidate("patch")
    compared = (Compared(launch, 1.0, 1.0, 0.5, 7), Compared(patch, 2.0, 2.0, 0.5, 7))
    chosen = pygraph.check_program(select_program(cut, {0: Selection(launch, "it was the fastest", compared)}))
    assert (chosen.regions[0].way, chosen.regions[0].times) == ("launch", (("launch", 1.0), ("patch", 2.0)))
    assert str(cut) == text
    assert select_program(cut, {}).regions == cut.regions


# ---- options ---------------------------------------------------------------------------------------------------


def selected(fn: Any) -> dict[str, Any]:
    """The selection of the one region of a function."""
    (region,) = fn.explain().to_dict()["regions"]
    return {"way": region["way"], "reason": region["reason"], **(region["selection"] or {})}


def never(run: Any) -> float:
    raise AssertionError("nothing is to be measured")


@pytest.mark.parametrize(("mode", "way"), [("heuristic", "patch"), ("replay", "patch"), ("launch", "launch")])
def test_modes_that_measure_nothing(x: torch.Tensor, mode: Any, way: str) -> None:
    fn = pygraph.select(pygraph.graphify(pygraph.indirect(step)), mode=mode, timer=never)
    for n in range(3):
        assert torch.equal(fn(x + n), step(x + n))
    found = selected(fn)
    assert found["way"] == way
    if mode == "heuristic":
        assert found["reason"] == "the cost model estimates it"
        assert [one["runs"] for one in found["compared"]] == [0, 0]
    if mode == "launch":
        assert found["reason"] == "the mode is launch"
        assert fn.cache_info().captures == 0


def test_the_model_of_costs_launches_what_copies_would_slow_down(x: torch.Tensor) -> None:
    many = torch.zeros(1 << 22, device=x.device)
    fn = pygraph.select(pygraph.graphify(lambda x: x[:2] + 1), mode="heuristic")  # without indirect, inputs are copied
    assert fn(many).tolist() == [1.0, 1.0]
    assert selected(fn)["way"] == "launch"


def test_the_objective_says_which_time_counts(x: torch.Tensor) -> None:
    """By a sample in which launches need little of the host, and replays little of the device."""
    driver = driver_for(x.device)
    assert driver is not None
    ways: dict[str, str] = {}
    for objective in ("throughput", "latency", "cpu"):
        fn = pygraph.select(pygraph.graphify(pygraph.indirect(step)), objective=objective)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(driver), "sample", _host_or_device)
            fn(x)
        ways[objective] = selected(fn)["way"]
    assert ways == {"throughput": "patch", "latency": "patch", "cpu": "launch"}


def _host_or_device(driver: Any, run: Any, *, latency: bool = False) -> Sample:
    run()
    if run.way == "launch":
        return Sample(10.0, 100.0, 105.0 if latency else None)
    return Sample(20.0, 50.0, 60.0 if latency else None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "'throughput' or 'latency' or 'cpu'"),
        ({"mode": "fast"}, "'measure' or 'heuristic' or 'replay' or 'launch'"),
        ({"budget": 0}, "a positive number of seconds"),
        ({"budget": True}, "a positive number of seconds"),
        ({"budget": float("nan")}, "a positive number of seconds"),
        ({"timer": 3}, "a function that times a run"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        pygraph.select(pygraph.graphify(step), **options)


def test_jit_takes_the_options_of_select(x: torch.Tensor) -> None:
    fn = pygraph.jit(mode="launch", objective="cpu", budget=0.5)(step)
    assert torch.equal(fn(x), step(x))
    assert selected(fn)["reason"] == "the mode is launch"
    policy = pygraph.jit(pygraph.devicify(step), objective="latency").options.selection
    assert (policy.objective, policy.mode, policy.budget) == ("latency", "measure", 1.0)
    with pytest.raises(ArgumentError, match=r"jit\(…\).*mode='fast'"):
        pygraph.jit(step, mode="fast")  # type: ignore[call-overload]


def test_a_mechanism_that_may_be_as_cheap_is_tried(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many nodes, those of the device's own updates may win, and the graph that stays has them."""
    driver = driver_for(x.device)
    assert driver is not None
    costs = dataclasses.replace(driver.costs(), update=1.0, update_word=0.1)
    monkeypatch.setattr(type(driver), "costs", lambda _: costs)

    def many(x: torch.Tensor) -> Any:
        return [x + n for n in range(8)]

    def timer(run: Any) -> float:
        run()
        return 10.0 if run.way == f"patch by {other}" else 30.0

    plain = pygraph.graphify(pygraph.indirect(many))
    plain(x)
    by_host = plain.explain().to_dict()["mechanisms"]["host"] > 0
    other = "device" if by_host else "host"
    fn = pygraph.select(pygraph.graphify(pygraph.indirect(many)), timer=timer)
    for n in range(3):
        torch.testing.assert_close(fn(x + n), many(x + n))
    assert selected(fn)["chosen"] == {"way": "patch", "mechanism": other}
    mechanisms = fn.explain().to_dict()["mechanisms"]
    assert mechanisms[other] >= 8


# ---- noise -----------------------------------------------------------------------------------------------------


class Noisy:
    """A made-up timer with a time for each way, what is added to them in turn, and a number of runs so far."""

    def __init__(self, times: dict[str, float], change: Callable[[int, str], float]) -> None:
        self.times, self.change, self.count = times, change, 0

    def __call__(self, run: Any) -> float:
        run()
        self.count += 1
        return self.times.get(run.way, 2 * self.times["patch"]) * self.change(self.count, run.way)


FAST = {"launch": 3000.0, "patch": 600.0, "copy": 650.0}
CLOSE = {"launch": 640.0, "patch": 600.0, "copy": 599.0}
SLOW = {"launch": 600.0, "patch": 700.0, "copy": 800.0}


def by(times: dict[str, float], change: Callable[[int, str], float], x: torch.Tensor) -> dict[str, Any]:
    fn = pygraph.select(pygraph.graphify(pygraph.indirect(step)), timer=Noisy(times, change))
    fn(x)
    return selected(fn)


def test_a_burst_while_the_graph_is_timed_decides_nothing(x: torch.Tensor) -> None:
    """Launches were timed before other work came: replays seem to take longer than they."""
    found = by(FAST, lambda n, way: 9.0 if 9 <= n < 13 else 1.0, x)
    assert found["way"] == "patch"


@pytest.mark.parametrize("every", [2, 3, 5])
def test_bursts_decide_nothing(x: torch.Tensor, every: int) -> None:
    found = by(FAST, lambda n, way: 1.0 + 30 * (n % every == 0), x)
    assert found["way"] == "patch"


def test_ties_go_to_the_prior(x: torch.Tensor) -> None:
    found = by(CLOSE, lambda n, way: 1.0, x)
    assert found["way"] == "patch"  # copies are a microsecond faster, of 600
    assert found["provisional"] is None
    assert found["reason"] == "nothing was faster by more than noise"


def test_noise_that_is_larger_than_the_difference_decides_nothing(x: torch.Tensor) -> None:
    random = np.random.default_rng(3)
    found = by(CLOSE, lambda n, way: float(random.uniform(0.5, 1.5)), x)
    assert found["way"] == "patch"
    assert found["provisional"] is not None


def test_a_true_difference_is_found_in_noise(x: torch.Tensor) -> None:
    random = np.random.default_rng(4)
    found = by(SLOW, lambda n, way: float(random.normal(1.0, 0.02)), x)
    assert found["way"] == "launch"
    assert found["confidence"] > 0.95
    assert found["lead"][0] > 0


def test_a_clock_that_drifts_is_noticed(x: torch.Tensor) -> None:
    found = by(SLOW, lambda n, way: 1.0 + 0.02 * n, x)
    assert found["way"] == "patch"
    assert "drifted" in found["provisional"]


@pytest.mark.parametrize("load", [8.0, 40.0])
def test_company_all_the_time(x: torch.Tensor, load: float) -> None:
    """Time slices of other processes: whatever runs takes as long as they want."""
    random = np.random.default_rng(5)
    for times in (FAST, CLOSE):
        found = by(times, lambda n, way: 1.0 + load * float(random.random()), x)
        assert found["way"] == "patch"
        assert found["provisional"] is not None


def test_in_company_a_graph_is_kept_even_if_the_model_prefers_launches() -> None:
    """Launches would be for good: later rounds have no graph to compare."""
    random = np.random.default_rng(6)
    fn = pygraph.select(
        pygraph.graphify(lambda x: x[:2] + 1),  # copies its input
        timer=Noisy({"launch": 1.0, "copy": 2.0, "patch": 1.0}, lambda n, way: 1.0 + 60 * float(random.random())),
    )
    fn(torch.zeros(1 << 22, device=pygraph.default_device()))
    found = selected(fn)
    assert (found["way"], found["reason"]) == ("copy", "launches are not proven to be faster")
    assert found["provisional"] is not None


def test_the_model_takes_what_launches_took_at_least(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper of Inductor's needs several times the host's time that the model has for a kernel."""
    driver = driver_for(x.device)
    assert driver is not None
    costs = dataclasses.replace(driver.costs(), launch=0.0)
    monkeypatch.setattr(type(driver), "costs", lambda _: costs)
    random = np.random.default_rng(7)
    found = by(FAST, lambda n, way: 1.0 + 8 * float(random.random()), x)
    assert (found["way"], found["reason"]) == ("patch", "the cost model prefers it")
    assert found["provisional"] is not None
