"""select: each way is picked when a timer says that it is the fastest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any

import pytest
import torch

import pygraph
from pygraph.calls.measuring import example_leaves, measured_program
from pygraph.errors import StageError
from pygraph.runtime import executable
from pygraph.runtime.devices import driver_for
from pygraph.runtime.discovery import RefusedError
from pygraph.transforms.select import select_program

WAYS = ("launch", "patch", "copy")


class Clock:
    """A timer that runs what it is given and says what it is told, in turn: launch, patch, copy."""

    def __init__(self, fastest: str) -> None:
        self.times = [1.0 if way == fastest else 2.0 for way in WAYS]
        self.asked = 0

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.asked += 1
        return self.times[(self.asked - 1) % 3]


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
    assert clock.asked == 3
    report = fn.explain().to_dict()
    (region,) = report["regions"]
    assert region["way"] == way
    assert region["times_us"] == {w: 1.0 if w == way else 2.0 for w in WAYS}
    assert (report["bytes_copied_per_replay"] > 0) == (way == "copy")
    assert (report["kernels_in_graphs"] > 0) == (way != "launch")


@pytest.mark.parametrize(("slow", "way"), [((2,), "patch"), ((2, 3, 5), "patch"), (range(2, 20), "launch")])
def test_a_burst_of_other_work_decides_nothing(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, slow: Container[int], way: str
) -> None:
    """While something else keeps the device busy, a replay seems slower than launches before that were."""
    driver = driver_for(x.device)
    assert driver is not None
    asked = 0

    def measure(driver: Any, run: Callable[[], object]) -> float:
        nonlocal asked
        run()
        asked += 1
        is_launch = asked == 1 or (asked % 2 == 0 and asked > 3)
        return 100.0 if is_launch else 1000.0 if asked in slow else 10.0

    monkeypatch.setattr(type(driver), "measure", measure)
    monkeypatch.setattr(executable.Executable, "_copies_may_be_faster", lambda *_: False)
    fn = pygraph.jit(step)
    assert torch.equal(fn(x), step(x))
    (region,) = fn.explain().to_dict()["regions"]
    assert region["way"] == way


def test_copies_are_not_tried_where_the_device_is_slower_than_the_host(x: torch.Tensor) -> None:
    many = pygraph.jit(lambda x: functools.reduce(lambda x, n: x.sin() + n, range(200), x))
    many(x)
    few = pygraph.jit(step)
    few(x)
    times = [fn.explain().to_dict()["regions"][0]["times_us"] for fn in (many, few)]
    assert [("copy" in one) for one in times] == [False, True]


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
    assert (region["way"], set(region["times_us"])) == ("patch", {"launch", "patch"})
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
    chosen = measured_program(cut, timer=Clock(way))
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


def test_choosing_is_a_function_of_regions_and_times(x: torch.Tensor) -> None:
    cut = pygraph.graphify(pygraph.indirect(pygraph.trace(step)(x)))
    text = str(cut)
    chosen = pygraph.check_program(select_program(cut, {0: {"launch": 1.0, "patch": 2.0}}))
    assert (chosen.regions[0].way, chosen.regions[0].times) == ("launch", (("launch", 1.0), ("patch", 2.0)))
    assert str(cut) == text
    assert select_program(cut, {}).regions == cut.regions
