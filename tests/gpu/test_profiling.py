"""Profiles on a GPU: kernels of the device by source line, of fused kernels too, and replays in torch's profiler."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import pygraph

pytestmark = pytest.mark.gpu


def attention(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with record_function("scores"):
        scores = torch.softmax(x @ x.mT, dim=-1)
    with record_function("values"):
        return scores @ x @ weight


def rows(fn: Any) -> list[dict[str, Any]]:
    profiles = [entry["profile"] for entry in fn.explain(profile=True).to_dict()["entries"]]
    return [row for found in profiles if isinstance(found, dict) for row in found["rows"]]


def measured(fn: Any, *args: Any) -> list[dict[str, Any]]:
    for _ in range(3):
        fn(*args)
    fn.explain(profile=True)
    fn(*args)
    return rows(fn)


def test_lines_and_scopes() -> None:
    x, weight = torch.randn(2, 64, 32, device="cuda"), torch.randn(32, 32, device="cuda")
    fast = pygraph.jit(attention, mode="replay")
    found = measured(fast, x, weight)
    torch.testing.assert_close(fast(x, weight), attention(x, weight))
    by_scope = {row["scopes"]: row for row in found}
    assert set(by_scope) == {("scores",), ("values",)}
    assert by_scope[("scores",)]["kernels"] >= 2
    assert by_scope[("values",)]["kernels"] >= 2
    assert all(row["us"] > 0 for row in found)
    assert sum(row["share"] for row in found) == pytest.approx(1)
    assert fast.explain(profile=True).to_dict()["profile"]["how"] == "times of the device, by torch.profiler"
    assert fast.explain().to_dict()["fallbacks"] == []


def test_a_long_kernel_takes_most_of_the_time() -> None:
    def function(x: torch.Tensor, small: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ x
        return product, small + 1

    large, small = torch.randn(4096, 4096, device="cuda"), torch.randn(4, device="cuda")
    first, second = measured(pygraph.jit(function, mode="replay"), large, small)
    assert first["text"] == "product = x @ x"
    assert first["us"] > second["us"]


def test_fused_kernels_have_lines_and_scopes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with record_function("first"):
            y = torch.relu(x) * 2
        z = y @ y.mT
        with record_function("second"):
            return torch.softmax(z, dim=-1)

    x = torch.randn(64, 512, device="cuda")
    fast = pygraph.jit(function, fuse=True, mode="replay")
    found = measured(fast, x)
    torch.testing.assert_close(fast(x), function(x))
    texts = {row["scopes"]: row["text"] for row in found}
    assert texts == {
        ("first",): "y = torch.relu(x) * 2", (): "z = y @ y.mT", ("second",): "return torch.softmax(z, dim=-1)",
    }  # fmt: skip
    assert all(row["us"] > 0 for row in found)


def test_a_training_step_is_unchanged() -> None:
    class Training:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 1)).cuda()
            self.optimizer = torch.optim.Adam(self.model.parameters())
            self.step = pygraph.jit(self.train, mode="replay")

        def train(self, x: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss

    x = torch.randn(16, 32, device="cuda")
    losses: list[list[torch.Tensor]] = []
    for is_profiled in (True, False):
        training = Training()
        torch.manual_seed(1)
        found = [training.step(x) for _ in range(4)]
        if is_profiled:
            training.step.explain(profile=True)
        losses.append([*found, *(training.step(x) for _ in range(3))])
        if is_profiled:
            report = rows(training.step)
            assert any(row["is_backward"] for row in report)
            assert any(row["scopes"] == ("Optimizer.step#Adam.step",) for row in report)
            assert training.step.explain().to_dict()["fallbacks"] == []
    for one, other in zip(*losses, strict=True):
        assert torch.equal(one, other)


def test_a_replay_in_torchs_profiler() -> None:
    """Its kernels lie in a range with the function's name, on the device as well as on the host."""
    x, weight = torch.randn(2, 64, 32, device="cuda"), torch.randn(32, 32, device="cuda")
    fast = pygraph.jit(attention, mode="replay")
    for _ in range(5):
        fast(x, weight)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        with record_function("mine"):
            result = fast(x, weight)
        torch.cuda.synchronize()
    torch.testing.assert_close(result, attention(x, weight))
    events = list(found.profiler.kineto_results.events())  # pyright: ignore
    on_device = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in on_device if not event.is_user_annotation()]
    nodes = fast.explain().to_dict()["nodes"]
    assert len(kernels) >= nodes > 0
    ranges = [event for event in events if event.name() == "pygraph: attention"]
    hosts = [event for event in ranges if event.device_type() == torch.autograd.DeviceType.CPU]
    devices = [event for event in ranges if event.device_type() == torch.autograd.DeviceType.CUDA]
    (host,) = hosts
    outer = next(event for event in events if event.name() == "mine")
    assert outer.start_ns() <= host.start_ns() <= host.end_ns() <= outer.end_ns()
    assert devices, "torch's profiler shows user annotations on the device where kernels were launched in them"
    first, last = min(event.start_ns() for event in devices), max(event.end_ns() for event in devices)
    assert all(first <= event.start_ns() and event.end_ns() <= last for event in kernels)


def test_ranges_of_nvtx() -> None:
    """With `emit_nvtx`, replays are ranges of NVTX; the user's ranges are scopes of nodes, and end when they should."""
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def function(x: torch.Tensor) -> torch.Tensor:
        push("mine")
        y = x.sin()
        pop()
        return y + 1

    fast = pygraph.jit(function, mode="replay")
    x = torch.randn(64, device="cuda")
    found = measured(fast, x)
    assert sorted(row["scopes"] for row in found) == [(), ("mine",)]
    hits = fast.cache_info().hits
    with torch.autograd.profiler.emit_nvtx():
        torch.testing.assert_close(fast(x), x.sin() + 1)
    assert fast.cache_info().hits == hits + 1
    assert fast.explain().to_dict()["fallbacks"] == []


def test_torch_compile_with_fused_kernels(fresh_dynamo: None) -> None:
    del fresh_dynamo

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x, dim=-1)

    compiled = torch.compile(function, backend=pygraph.backend)
    x = torch.randn(128, 128, device="cuda")
    for _ in range(3):
        compiled(x)
    pygraph.explain(profile=True)
    torch.testing.assert_close(compiled(x), function(x))
    report = pygraph.explain(profile=True).to_dict()
    found = [
        row for entry in report["entries"] if isinstance(entry["profile"], dict) for row in entry["profile"]["rows"]
    ]
    assert sum(row["kernels"] for row in found) >= 2
    assert any(re.match(r"test_profiling\.py:\d+", row["source"] or "") for row in found)


def test_it_is_not_measured_below_another_profiler() -> None:
    fast = pygraph.jit(attention, mode="replay")
    x, weight = torch.randn(2, 64, 32, device="cuda"), torch.randn(32, 32, device="cuda")
    for _ in range(3):
        fast(x, weight)
    fast.explain(profile=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True):
        fast(x, weight)
    assert not rows(fast)
    fast(x, weight)
    assert rows(fast)
