"""Times, distances of results, and what a profiler's trace shows."""

from __future__ import annotations

import doctest
import math
import time
from typing import Any

import pytest
import torch

from benchmarks import reporting
from benchmarks.table import checking, comparison, measuring, results, runner, setting, text, tracing, ways
from benchmarks.table.results import Row


@pytest.mark.parametrize("module", [checking, comparison, reporting, results, runner, setting, text, ways])
def test_examples(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_a_way_that_fails_leaves_the_others() -> None:
    calls: list[int] = []

    def fails_later(batch: int) -> None:
        calls.append(batch)
        if len(calls) > 20:
            raise ValueError("no more")

    runs = {"good": lambda batch: time.sleep(1e-4), "bad": fails_later}
    meters = measuring.Meters(runs, [0, 1, 2], lambda: None)
    meters.calibrate(0.001)
    for _ in range(3):
        meters.round()
    found = meters.result()
    assert found["bad"] == {"error": "measuring: ValueError: no more"}
    assert found["good"]["wall_us"][1] > 100
    assert set(calls) == {0, 1, 2}


@pytest.mark.parametrize(
    ("found", "right"), [([1.0, 2.0], True), ([1.01, 2.0], True), ([1.5, 2.0], False), ([math.nan, 2.0], False)]
)
def test_losses(found: list[float], right: bool) -> None:
    assert checking.Reference("eager", None, 0.02).check(checking.loss_distance(found, [1.0, 2.0]))["right"] == right


def test_losses_with_other_random_numbers() -> None:
    reference = checking.Reference("eager", None, 0.02, spread=0.3)
    assert reference.check(0.5) == {"distance": 0.5, "right": False}
    assert reference.check(0.5, draws_otherwise=True)["right"]
    assert reference.check(math.inf) == {"distance": None, "right": False}


def test_distances() -> None:
    infinite = torch.tensor([-math.inf, 1.0])
    assert checking.distance([infinite], [infinite]) == 0
    assert checking.distance([torch.ones(2)], [infinite]) == math.inf
    assert checking.distance([torch.ones(2)], [torch.ones(3)]) == math.inf
    assert checking.distance([torch.full((2,), math.nan)], [torch.ones(2)]) == math.inf


# ---- traces --------------------------------------------------------------------------------------------------------


def event(kind: str, name: str, correlation: int, begin: float = 0.0, duration: float = 1.0, **args: Any) -> Any:
    args = {"correlation": correlation, **args}
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": duration, "args": args}


def test_kernels_of_graphs_are_found_by_their_launch() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        event("cpu_op", "aten::add", 1),
        event("cuda_runtime", "cudaGraphLaunch", 1),
        event("kernel", "gemm", 1, 0.0, 6.0),
        event("kernel", "relu", 1, 6.0, 2.0),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1, 8.0, 1.0, bytes=4096),
        event("cuda_runtime", "cudaLaunchKernel", 2),
        event("kernel", "direct_copy_kernel", 2, 20.0, 2.0),
        event("cuda_runtime", "cudaMemcpyAsync", 3),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 3, 21.0, 3.0, bytes=8),
        {"ph": "f", "cat": "ac2g", "id": 1},
    ]
    assert tracing.summary(events, 1) == {
        "kernels": 3.0,
        "coverage": 0.6667,
        "coverage_time": 0.8,
        "graph_launches": 1.0,
        "busy_us": 13.0,
        "kernels_us": 10.0,
        "copied": {"DtoD": [1.0, 4096.0], "HtoD": [1.0, 8.0]},
        "copy_kernels": 1.0,
        "copy_kernels_us": 2.0,
        "unattributed": 0.0,
        "longest": [["gemm", 1.0, 6.0], ["relu", 1.0, 2.0], ["direct_copy_kernel", 1.0, 2.0]],
    }


@pytest.mark.parametrize(
    ("events", "coverage", "unattributed"),
    [
        ([event("cuda_driver", "cuGraphLaunch", 1), event("kernel", "a", 1)], 1.0, 0),
        ([event("cuda_driver", "cuLaunchKernel", 1), event("kernel", "a", 1)], 0.0, 0),
        ([event("kernel", "a", 1), event("kernel", "b", 1)], 1.0, 0),
        ([event("kernel", "a", 1, **{"graph node id": 7})], 1.0, 0),
        ([event("kernel", "a", 1, **{"graph node id": 0})], 0.0, 1),
        ([event("cuda_runtime", "cudaStreamSynchronize", 1), event("kernel", "a", 1)], 0.0, 1),
        ([], None, 0),
    ],
)
def test_launches_by_the_driver(events: list[Any], coverage: float | None, unattributed: int) -> None:
    found = tracing.summary(events, 1)
    assert found["coverage"] == coverage
    assert found["unattributed"] == unattributed


def test_bytes_that_a_report_counts() -> None:
    def entry(calls: int, copied: int, function: str | None = None) -> Row:
        return {"function": function, "arguments": ["x"], "calls": calls, "bytes_copied_per_replay": copied,
                "differentiated": False}  # fmt: skip

    before = [entry(5, 100)]
    assert tracing.bytes_per_iteration(before, [entry(9, 100), entry(4, 7, "backward")], 4) == 107
    assert tracing.bytes_per_iteration(before, before, 4) is None
