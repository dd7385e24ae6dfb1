"""Recorded regions at work: proof, copies, refusals, memory, threads; on the emulated device and on CUDA."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import pygraph
from pygraph.runtime.emulated import driver as emulated
from tests.memory import live_bytes


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(1.0, 7.0, device=device).view(2, 3)


def report(fn: Any) -> dict[str, Any]:
    return fn.explain().to_dict()


def test_inputs_may_go_right_after_the_call(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: torch.sin(x) + 1)
    for n in range(5):
        mine = x + n
        expected = torch.sin(mine) + 1
        result = fn(mine)
        mine.fill_(float("nan"))
        del mine
        junk = [torch.full_like(x, float("nan")) for _ in range(3)]
        assert torch.equal(result, expected)
        del junk


def test_views_at_offsets_and_strides(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: x * 2)
    memory = torch.arange(1024.0, device=x.device)
    for view in (memory[:6], memory[64:70], memory[1:7], memory[0:12:2], memory.view(32, 32).t()[:2]):
        assert torch.equal(fn(view), view * 2)


@pytest.mark.parametrize("offset", range(1, 5))
def test_a_misaligned_input(x: torch.Tensor, offset: int) -> None:
    fn = pygraph.jit(lambda x: x * 2)
    memory = torch.arange(64.0, device=x.device)
    for start in (0, offset, 0, offset):
        view = memory[start : start + 8]
        assert torch.equal(fn(view), view * 2)
    assert report(fn)["bytes_copied_per_replay"] == 0


def test_regions_with_eager_work_between(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor, k: float) -> tuple[torch.Tensor, ...]:
        a = torch.sin(x) * k
        few = a[a > 0]
        return few, torch.cos(few.sum() + a), x.add_(1)

    fast = pygraph.jit(fn)
    mine, eager = x.clone(), x.clone()
    held: list[Any] = []
    for k in (1.0, -1.0, 0.5, 0.0):
        got, expected = fast(mine, k), fn(eager, k)
        held.append(([g.clone() for g in expected[:2]], got[:2]))
        torch.testing.assert_close(got, expected)
    for old, kept in held:
        torch.testing.assert_close(list(kept), old)
    assert [region["kind"] for region in report(fast)["regions"]].count("eager") == 1


def test_an_update_of_an_argument_reaches_the_caller(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x, y: x.add_(y).sum())
    for n in range(4):
        mine = x + n
        fn(mine, x)
        assert torch.equal(mine, x + n + x)


def test_threads_share_one_graph(x: torch.Tensor) -> None:
    fn = pygraph.jit(lambda x: torch.sin(x) * 2)
    fn(x)
    results: dict[int, torch.Tensor] = {}

    def work(n: int) -> None:
        for _ in range(25):
            results[n] = fn(x + n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        torch.testing.assert_close(results[n], torch.sin(x + n) * 2)


def test_released_graphs_leave_nothing(device: torch.device) -> None:
    before = live_bytes(device)
    x = torch.ones(64, 64, device=device)
    compiled = pygraph.jit(lambda x: torch.sin(x) * x).lower(x).compile()
    result = compiled(x)
    del compiled
    assert torch.equal(result, torch.sin(x) * x)
    del result, x
    assert live_bytes(device) <= before


# ---- only the emulated device knows these --------------------------------------------------------------------------


@pytest.fixture
def emu() -> Any:
    return emulated.driver()


def test_a_hidden_pointer_is_copied_and_reported(emu: Any) -> None:
    fn = pygraph.graphify(pygraph.indirect(lambda x: torch.cumprod(x, 0)))
    for n in range(4):
        x = torch.arange(1.0, 5.0, device=emu.device) + n
        assert torch.equal(fn(x), torch.cumprod(x, 0))
    data = report(fn)
    assert data["bytes_copied_per_replay"] >= 16
    reasons = " ".join(fallback["what"] + " " + fallback["reason"] for fallback in data["fallbacks"])
    assert "copied" in reasons
    assert "cumprod" in reasons


def test_a_node_that_the_device_refuses_runs_between_graphs(emu: Any) -> None:
    library = torch.library.Library("test_executable", "FRAGMENT")
    library.define("synchronous(Tensor x) -> Tensor")

    def synchronous(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().cpu())

    library.impl("synchronous", synchronous, "PrivateUse1")
    library.impl("synchronous", lambda x: torch.empty_like(x), "Meta")
    try:
        fn = pygraph.graphify(pygraph.indirect(lambda x: torch.ops.test_executable.synchronous(torch.sin(x)).cos()))
        for n in range(3):
            x = torch.arange(1.0, 5.0, device=emu.device) + n
            torch.testing.assert_close(fn(x), (torch.sin(x) * torch.sin(x).sum()).cos())
        data = report(fn)
        assert [region["kind"] for region in data["regions"]] == ["graph", "eager", "graph"]
        (fallback,) = data["fallbacks"]
        assert fallback["what"] == "torch.ops.test_executable.synchronous.default"
        assert fallback["source"].startswith("test_executable.py:")
    finally:
        library._destroy()


def test_a_replay_is_one_launch_and_no_copy(emu: Any) -> None:
    fn = pygraph.jit(lambda x: torch.relu(torch.sin(x) * 2) + 1)
    xs = [torch.ones(8, device=emu.device) + n for n in range(3)]
    fn(xs[0])
    counters = emu.counters
    launches, copies, synchronizations = counters.launches, counters.copies, counters.synchronizations
    for x in xs:
        fn(x)
    assert counters.launches - launches == len(xs)
    assert counters.copies == copies
    assert counters.synchronizations == synchronizations
