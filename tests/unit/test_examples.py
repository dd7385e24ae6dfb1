"""The programs in examples/: they run, on both devices, and what they claim holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import training_comparison


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
