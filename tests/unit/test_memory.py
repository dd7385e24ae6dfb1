"""How much memory graphs hold: what explain() says, and that nothing of it stays."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.calls import limits
from pygraph.errors import FallbackError
from pygraph.runtime.devices import driver_for
from tests.memory import live_bytes, peak_followed
from tests.unit.calls.test_retries import seldom


def replayed(fn: Any, **options: Any) -> Any:
    return pygraph.graphify(pygraph.indirect(pygraph.devicify(fn)), **options)


def memory(fn: Any) -> dict[str, int]:
    return fn.explain().to_dict()["memory"]


def test_bytes_of_captured_tensors_and_results(device: torch.device) -> None:
    net = nn.Linear(64, 32).to(device).requires_grad_(False)
    fn = replayed(lambda x: (torch.relu(net(x)), x.sum()))
    assert memory(fn) == {"pool": 0, "static": 0, "copied": 0, "outputs": 0}
    fn(torch.ones(8, 64, device=device))
    report = memory(fn)
    assert report["static"] == (64 * 32 + 32) * 4
    assert report["outputs"] == 8 * 32 * 4 + 4
    assert report["copied"] == 0
    assert report["pool"] > 0
    assert "memory in bytes" in str(fn.explain())
    assert "8,320" in str(fn.explain())


def test_bytes_of_copied_inputs(device: torch.device) -> None:
    fn = pygraph.graphify(lambda x, y: torch.sin(x) + y)
    fn(torch.ones(8, 64, device=device), torch.ones(64, device=device))
    assert memory(fn)["copied"] == (8 * 64 + 64) * 4


def test_reused_results_are_not_allocated(device: torch.device) -> None:
    fn = replayed(lambda x: x + 1, reuse_outputs=True)
    fn(torch.ones(8, 64, device=device))
    assert memory(fn)["outputs"] == 0


def test_a_device_that_cannot_record(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with another allocator than torch's: calls run as they are, and the report says why."""
    driver = driver_for(device)
    monkeypatch.setattr(type(driver), "refusal", lambda self: "its allocator keeps nothing")
    fn, strict = pygraph.jit(lambda x: torch.sin(x) + 1), pygraph.jit(lambda x: torch.sin(x) + 1, strict=True)
    x = torch.ones(8, device=device)
    for _ in range(3):
        assert torch.equal(fn(x), torch.sin(x) + 1)
    assert fn.cache_info().captures == 0
    assert "its allocator keeps nothing" in str(fn.explain())
    with pytest.raises(FallbackError, match="keeps nothing"):
        strict(x)
    compiled = pygraph.jit(lambda x: torch.sin(x) + 1).lower(x).compile()
    assert torch.equal(compiled(x), torch.sin(x) + 1)


def test_what_runs_as_it_is_holds_no_memory(device: torch.device) -> None:
    fn = pygraph.jit(lambda x: x if str(x) else -x)
    fn(torch.ones(8, device=device))
    assert set(memory(fn).values()) == {0}
    assert "memory in bytes" not in str(fn.explain())


def test_graphs_share_one_pool(device: torch.device) -> None:
    fn = replayed(lambda x: torch.tanh(x + 1) * 2)
    for n in (1, 2, 3, 4):
        fn(torch.ones(n, 64, device=device))
    pools = [entry["memory"]["pool"] for entry in fn.explain().to_dict()["entries"]]
    assert len(pools) == 4
    assert len(set(pools)) == 1


def test_a_pool_has_room_for_results_once(device: torch.device) -> None:
    """The recording that is only compared with has a pool of its own."""
    x = torch.ones(1 << (24 if device.type == "cuda" else 20), device=device)  # CUDA has segments of 20 MiB for less
    fn = pygraph.jit(lambda x: (torch.sin(x), torch.cos(x)))
    fn(x)
    assert memory(fn)["pool"] < 1.5 * 2 * x.nbytes


def test_a_first_call_copies_arguments_twice(device: torch.device) -> None:
    """For trials, and to be recorded with; the recording that is only compared with takes the copies for trials."""
    x = torch.ones(1 << 20, device=device)
    fn = replayed(lambda x: torch.tanh(x).sum())
    before = live_bytes(device)
    with peak_followed(device) as peak:
        fn(x)
    assert peak[0] - before < 3.5 * x.nbytes, "two copies, and what the function computes"


@pytest.mark.parametrize("kind", ["plain", "view", "transposed", "small"])
def test_no_stand_in_of_a_patched_input_is_kept(device: torch.device, kind: str) -> None:
    """A graph on patched pointers holds less than its inputs."""
    base = torch.ones(1 << 16, device=device)
    x = {"plain": base, "view": base[64:], "transposed": base.view(256, 256).t(), "small": base[:4]}[kind]
    fn = replayed(lambda x: torch.tanh(x).sum())
    before = live_bytes(device)
    fn(x)
    held = live_bytes(device) - before
    assert memory(fn)["copied"] == 0
    assert held < max(x.nbytes, 4096)


@pytest.mark.slow
@pytest.mark.parametrize(("captures", "options"), [(60, {}), (20, {"reuse_outputs": True})], ids=["fresh", "reused"])
def test_many_captures_and_evictions_leave_nothing(
    device: torch.device, captures: int, options: dict[str, Any]
) -> None:
    weight = torch.ones(4, device=device)
    x = torch.ones(1024, 4, device=device)
    before = live_bytes(device)
    fn = replayed(lambda x: x * weight, max_graphs=4, **options)
    for n in range(1, captures + 1):
        for _ in range(limits.LIMITS.settled_calls):  # a cache that only turns over stops capturing
            fn(x[:n])
    info = fn.cache_info()
    assert (info.captures, info.evictions) == (captures, captures - 4)
    assert live_bytes(device) - before < 4 * 2 * x.nbytes  # of four graphs, not of all
    fn.cache_clear()
    assert live_bytes(device) <= before
    assert torch.equal(fn(x[:3]), x[:3])
    del fn
    assert live_bytes(device) <= before


@pytest.mark.slow
def test_a_thousand_captures_leave_nothing(device: torch.device) -> None:
    weight = torch.ones(4, device=device)
    x = torch.ones(64, 4, device=device)
    before = live_bytes(device)
    lowered = replayed(lambda x: x * weight).lower(x)
    for _ in range(1000):
        compiled = lowered.compile()
    assert torch.equal(compiled(x), x)
    assert compiled.explain().to_dict()["kernels_in_graphs"] == 1
    del compiled, lowered
    assert live_bytes(device) <= before


def test_kinds_of_calls_hold_no_tensors_of_their_own(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    seldom(monkeypatch, late_kind_share=1e9)  # every kind is recorded when it comes again
    driver = driver_for(device)
    assert driver is not None

    def alive() -> list[torch.Tensor]:
        driver.synchronize()  # after which nothing of graphs that were dropped waits for the device
        gc.unfreeze()  # what was set aside between tests, which the first leak of a trace brings back
        gc.collect()
        return [one for one in gc.get_objects() if type(one) is torch.Tensor]

    def described(tensor: torch.Tensor) -> str:
        return f"{tuple(tensor.shape)} {tensor.device} {[type(one).__name__ for one in gc.get_referrers(tensor)]}"

    fast = pygraph.jit(lambda x: x * 2 + 1, max_graphs=16)
    fast(torch.ones(1, device=device))
    before = alive()
    known = {id(tensor) for tensor in before}  # which are theirs as long as they are held
    for size in range(1, 41):
        for _ in range(limits.LIMITS.settled_calls):
            fast(torch.ones(size, device=device))
    assert fast.cache_info().size == 16
    new = [tensor for tensor in alive() if id(tensor) not in known]
    assert len(new) < 4, [described(tensor) for tensor in new]
