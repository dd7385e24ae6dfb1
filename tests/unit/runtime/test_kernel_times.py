"""Kernels by operations: of a profiler's events on CUDA, and of the emulated device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from pygraph.ir.descriptors import TensorSpec
from pygraph.report.profile import OperationTime, Profile
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import KernelTime
from pygraph.runtime.profiling import operation_times

attributed = pytest.importorskip("pygraph.runtime.cuda.kernel_times").attributed


@dataclasses.dataclass
class Event:
    """An event as torch's profiler has them."""

    title: str
    begin: int
    end: int
    number: int = 0
    linked: int = 0
    on_device: bool = False
    annotation: bool = False

    def name(self) -> str:
        return self.title

    def start_ns(self) -> int:
        return self.begin

    def end_ns(self) -> int:
        return self.end

    def duration_ns(self) -> int:
        return self.end - self.begin

    def correlation_id(self) -> int:
        return self.number

    def linked_correlation_id(self) -> int:
        return self.linked

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.on_device else DeviceType.CPU

    def is_user_annotation(self) -> bool:
        return self.annotation


def kernel(title: str, begin: int, end: int, number: int, linked: int = 0) -> Event:
    return Event(title, begin, end, number, linked, on_device=True)


def test_kernels_belong_to_the_operation_that_was_open_when_they_were_launched() -> None:
    events = [
        kernel("late", 9000, 11_000, 3),  # the device is behind the host
        Event("pygraph operation 0 0", 100, 200, annotation=True),
        Event("cudaLaunchKernel", 110, 120, 1),
        Event("cuLaunchKernelEx", 150, 160, 2),
        Event("pygraph operation 0 2", 200, 300, annotation=True),
        Event("cudaMemcpyAsync", 210, 220, 3),
        Event("pygraph operation 1 0", 400, 500, annotation=True),
        Event("cudaLaunchKernel", 410, 420, 4),
        kernel("second", 6000, 8000, 2),
        kernel("first", 1000, 5000, 1),
        kernel("again", 12_000, 12_500, 4),
        Event("pygraph operation 0 0", 1000, 8000, on_device=True, annotation=True),
    ]
    assert attributed(events, 2) == [
        [KernelTime(0, "first", 4.0), KernelTime(0, "second", 2.0), KernelTime(2, "late", 2.0)],
        [KernelTime(0, "again", 0.5)],
    ]


def test_other_kernels_are_left_out() -> None:
    events = [
        Event("cudaLaunchKernel", 50, 60, 1),  # a restoration before the first operation
        kernel("before", 1000, 2000, 1),
        Event("pygraph operation 0 0", 100, 200, annotation=True),
        Event("cudaLaunchKernel", 300, 310, 2),
        kernel("after", 3000, 4000, 2),
        kernel("unknown", 5000, 6000, 3),
    ]
    assert attributed(events, 1) == [[]]


def test_a_launch_that_was_not_seen_is_that_of_torchs_operation() -> None:
    """Numbers of operations and of CUDA's calls are different numbers."""
    events = [
        Event("pygraph operation 0 5", 100, 200, annotation=True),
        Event("custom::fill", 110, 120, 7),
        Event("cudaLaunchKernel", 300, 310, 8),
        kernel("fill", 1000, 2000, number=9, linked=7),
        kernel("elsewhere", 3000, 4000, number=8, linked=7),
    ]
    assert attributed(events, 1) == [[KernelTime(5, "fill", 1.0)]]


def test_events_of_torch_have_what_is_read() -> None:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found, record_function("pygraph operation 0 1"):
        torch.ones(3)
    events = found.profiler.kineto_results.events()  # pyright: ignore
    assert attributed(events, 1) == [[]]
    assert "pygraph operation 0 1" in [event.name() for event in events]


class Body:
    """A region with two operations."""

    def __init__(self) -> None:
        graph = fx.Graph()
        x = graph.placeholder("x")
        self.nodes = [graph.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(2)]
        for number, node in enumerate(self.nodes):
            node.meta = {"spec": TensorSpec.of(torch.ones(2)), "source": f"train.py:{number}", "scopes": ("scope",)}


def test_the_median_of_runs_counts() -> None:
    runs = [[KernelTime(0, "a", 1.0), KernelTime(1, "b", time)] for time in (5.0, 2.0, 3.0)]
    runs[1].insert(1, KernelTime(0, "another", 100.0))  # of one run alone
    first, second = operation_times(Body(), runs)  # pyright: ignore[reportArgumentType]
    assert first == OperationTime("train.py:0", ("scope",), "aten.sin.default", (1.0,), node="sin_default")
    assert second.kernels == (3.0,)
    assert [one.kernels for one in operation_times(Body(), [[], []])] == [(), ()]  # pyright: ignore[reportArgumentType]


def test_the_same_line_in_other_scopes_is_another_row() -> None:
    times = [
        OperationTime("nowhere.py:1", (scope,), "sin", (2.0,), is_backward=is_backward)
        for scope, is_backward in (("a", False), ("b", False), ("a", True), ("a", False))
    ]
    rows = Profile.of(times, "").rows
    assert [(row.scopes, row.is_backward, row.kernels, row.share) for row in rows] == [
        (("a",), False, 2, 0.5), (("b",), False, 1, 0.25), (("a",), True, 1, 0.25),
    ]  # fmt: skip
    assert {row.text for row in rows} == {""}


def test_kernels_of_the_device(device: torch.device) -> None:
    driver = driver_for(device)
    assert driver is not None
    x = torch.ones(4, device=device)
    restored: list[int] = []

    def run(mark: object) -> None:
        assert callable(mark)
        mark(0)
        y = x.sin()
        mark(1)
        x.copy_(y)
        mark(2)
        (y + 1).mul_(2)

    def restore() -> None:
        restored.append(1)
        x.fill_(1)

    runs = driver.kernel_times(run, restore, 3)
    assert [[kernel.op for kernel in kernels] for kernels in runs] == [[0, 1, 2, 2]] * 3
    assert all(kernel.us > 0 for kernels in runs for kernel in kernels)
    assert len(restored) == 4
    assert torch.equal(x, torch.ones(4, device=device).sin())
