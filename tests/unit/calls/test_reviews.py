"""Selections that are provisional, as the device was busy: measured again later, for a thousandth of the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch

import pygraph
from pygraph.calls import limits
from pygraph.calls.reviews import calls_for
from pygraph.runtime.devices import driver_for
from pygraph.runtime.executable import Executable
from pygraph.runtime.samples import Sample


class Device:
    """How a device samples here: at first, others keep it busy."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.is_busy, self.rounds = True, 0
        self.times = {"launch": 300.0, "patch": 60.0}

    def sample(self, driver: Any, run: Any, *, latency: bool = False) -> Sample:
        run()
        self.rounds += run.way == "launch"
        time = self.times.get(run.way, 100.0) * (1 + 20 * float(self.random.random()) * self.is_busy)
        return Sample(time, time)


@pytest.fixture
def measured(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Generator[Device, None, None]:
    found = Device()
    driver = driver_for(device)
    monkeypatch.setattr(type(driver), "sample", lambda driver, run, **options: found.sample(driver, run, **options))
    monkeypatch.setattr(type(driver), "is_exact", False)
    monkeypatch.setattr(type(driver), "others", lambda driver: None)
    monkeypatch.setattr(limits, "LIMITS", dataclasses.replace(limits.LIMITS, review_share=1e3))  # every few calls
    return found


class Step:
    """A function with state, whose calls are compared with eager ones."""

    def __init__(self, device: torch.device) -> None:
        self.count, self.expected = torch.zeros(4, device=device), 0.0
        self.x = torch.arange(4.0, device=device)
        count = self.count

        def run(x: torch.Tensor) -> torch.Tensor:
            count.add_(1)
            return torch.relu(x * 2) + count + torch.rand_like(x)

        self.fn = pygraph.select(pygraph.graphify(pygraph.indirect(run)))

    def call(self) -> None:
        torch.manual_seed(int(self.expected))
        got = self.fn(self.x)
        self.expected += 1
        torch.manual_seed(int(self.expected) - 1)
        torch.testing.assert_close(got, torch.relu(self.x * 2) + self.expected + torch.rand_like(self.x))
        assert self.count.tolist() == [self.expected] * 4

    def selection(self) -> dict[str, Any]:
        (region,) = self.fn.explain().to_dict()["regions"]
        return {"region_way": region["way"], **(region["selection"] or {})}


@pytest.mark.parametrize("way", ["patch", "launch"])
def test_it_is_measured_again_until_it_is_sure(device: torch.device, native: bool, measured: Device, way: str) -> None:
    step = Step(device)
    step.call()
    found = step.selection()
    assert found["region_way"] == "patch"  # by the prior
    assert found["provisional"] is not None
    measured.is_busy = False
    measured.times = {"launch": 300.0 if way == "patch" else 20.0, "patch": 60.0}
    for _ in range(200):
        step.call()
        if step.selection()["provisional"] is None:
            break
    found = step.selection()
    assert (found["region_way"], found["provisional"]) == (way, None)
    assert found["lead"][0] > 0
    rounds = measured.rounds
    for _ in range(50):
        step.call()
    assert measured.rounds == rounds


def test_a_device_that_stays_busy_is_measured_for_a_while_only(
    device: torch.device, native: bool, measured: Device
) -> None:
    step = Step(device)
    for _ in range(300):
        step.call()
    found = step.selection()
    assert (found["region_way"], found["provisional"]) == ("patch", None)
    rounds = measured.rounds
    for _ in range(50):
        step.call()
    assert measured.rounds == rounds


def test_rounds_take_less_than_a_thousandth_of_the_time(
    device: torch.device, native: bool, measured: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LIMITS", limits.Limits())
    step = Step(device)
    step.call()
    (entry,) = step.fn.engine.cache.entries
    # At least the times of both, of which a call takes the smaller one.
    assert entry.reviews.due > 1000 * (measured.times["launch"] + measured.times["patch"]) / measured.times["patch"]
    rounds = measured.rounds
    for _ in range(50):
        step.call()
    assert measured.rounds == rounds


def test_the_share_of_time() -> None:
    assert calls_for(1000.0, 100.0) == 10_000
    assert calls_for(1000.0, 0.0) == 1_000_000


def test_other_processes_make_it_provisional(
    device: torch.device, measured: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.is_busy = False
    driver = driver_for(device)
    monkeypatch.setattr(type(driver), "others", lambda driver: "2 other processes kept the device busy")
    step = Step(device)
    step.call()
    assert "2 other processes" in step.selection()["provisional"]
    assert "to be measured again, as 2 other processes" in " ".join(str(step.fn.explain()).split())


def test_no_memory_for_rounds(device: torch.device, measured: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it stays as it is, and calls go on."""
    step = Step(device)
    step.call()

    def full(driver: Any, run: Any, **options: Any) -> Sample:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(type(driver_for(device)), "sample", full)
    for _ in range(50):
        step.call()
    assert step.selection()["region_way"] == "patch"
    assert step.selection()["provisional"] is None


def test_no_memory_for_copies(device: torch.device, measured: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are there any of what a call updates; the report says so."""
    step = Step(device)
    step.call()

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no copies today")

    monkeypatch.setattr(Executable, "review", full)
    for _ in range(50):
        step.call()
    assert step.selection()["region_way"] == "patch"
    assert "it is not measured again: no copies today" in str(step.fn.explain())


def test_results_in_memory_that_is_used_again(device: torch.device, native: bool, measured: Device) -> None:
    """A round between calls would write to an earlier result, which is an argument here."""
    fn = pygraph.jit(lambda x: torch.relu(x * 2) + 1, reuse_outputs=True)
    x = torch.arange(4.0, device=device)
    rounds = 0
    for n in range(60):
        expected = torch.relu(x * 2) + 1 if n % 3 else x.clone().add_(n)
        x = fn(x) if n % 3 else x.clone().add_(n)
        assert torch.equal(x, expected)
        rounds = measured.rounds if n == 2 else rounds
    assert measured.rounds == rounds


def test_training_steps(device: torch.device, native: bool, measured: Device) -> None:
    """Forward and backward are functions of their own, whose reviews leave gradients alone."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(device)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(device)
    plain.load_state_dict(net.state_dict())
    fast = pygraph.jit(net)
    for n in range(60):
        if n == 20:
            measured.is_busy = False
        x = torch.full((2, 4), n / 10, device=device)
        for model, run in ((net, fast), (plain, plain)):
            model.zero_grad()
            run(x).square().sum().backward()
        for mine, its in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad)
