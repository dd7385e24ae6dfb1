"""The programs in examples/: they run, on both devices, and what they claim holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import greedy_loop
import training_comparison

from tests.steps import assert_one_graph


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")  # of the ways of torch, and Inductor's
def test_training_comparison(device: torch.device) -> None:
    """Losses are equal in all ways (`compare` raises an error where they are not), and graphs are replayed."""
    task = training_comparison.Task(device, width=16, layers=1, heads=2, batch=2, length=8)
    ways = {way.name: way for way in training_comparison.compare(task, rounds=2, block=2)}
    expected = training_comparison.WAYS | (training_comparison.WAYS_ON_CUDA if device.type == "cuda" else {})
    assert list(ways) == list(expected)
    for way in ways.values():
        assert len(way.losses) == 9
        assert len(way.cpu) == len(way.wall) == 2
        if way.graphed is not None:
            report = way.graphed.explain().to_dict()
            assert way.graphed.cache_info().hits >= 6, way.name
            assert not [f for f in report["fallbacks"] if "no pointer to it was found" not in f["reason"]], way.name
    lines = training_comparison.table(list(ways.values())).splitlines()
    assert len(lines) == 1 + len(ways)
    assert "1.00×" in lines[1]


def test_losses_that_differ_are_noticed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(task: training_comparison.Task) -> tuple[training_comparison.Step, None]:
        step, _ = training_comparison.no_graph(task)
        return lambda x, y: step(x, y) + 0.1, None

    monkeypatch.setattr(training_comparison, "WAYS", {"no graph": training_comparison.no_graph, "other": other})
    monkeypatch.setattr(training_comparison, "WAYS_ON_CUDA", {})
    task = training_comparison.Task(device, width=16, layers=1, heads=2, batch=2, length=8)
    with pytest.raises(AssertionError, match="other"):
        training_comparison.compare(task, rounds=1, block=1)


def test_greedy_loop(device: torch.device) -> None:
    """All ways write the same tokens (`compare` raises an error where they do not), and some sequences end early."""
    task = greedy_loop.task_of(device, width=16, limit=24, eagerness=3.0)
    times, lengths = greedy_loop.compare(task, device, batch=2, width=16, rounds=3)
    assert [len(found) for found in times.values()] == [3, 3, 3]
    assert min(lengths) < 24


def test_a_greedy_loop_is_one_graph(device: torch.device) -> None:
    task = greedy_loop.task_of(device, width=16, limit=24)
    write = greedy_loop.ways_of(task)["a loop in a graph"]
    with torch.no_grad():
        for number in range(4):
            token, state = torch.tensor([1, 2], device=device), torch.full((2, 16), number / 4, device=device)
            assert torch.equal(write(token, state), task.in_python(token, state))
    assert_one_graph(write, 4)
