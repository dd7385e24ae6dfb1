"""Memory for graphs that cannot be had, as another thread ends every capture: the call runs, and says what it lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import InterruptedCaptureError


@pytest.mark.parametrize("last", [None, 0, 1, 2, 3])
def test_a_call_whose_pools_are_refused_runs(
    last: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pools are there up to a number; then none is."""
    driver: Any = driver_for(device)
    original, asked = driver.new_pool, 0

    def new_pool(**options: Any) -> Any:
        nonlocal asked
        asked += 1
        if last is not None and asked > last:
            raise InterruptedCaptureError("somebody waited for the device")
        return original(**options)

    monkeypatch.setattr(driver, "new_pool", new_pool)
    fast = pygraph.jit(lambda x: torch.relu(x @ x) + 1)
    for _ in range(3):
        x = torch.rand(8, 8, device=device)
        torch.testing.assert_close(fast(x), torch.relu(x @ x) + 1)
    reasons = [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]
    assert all("somebody waited" in reason for reason in reasons)
    if last is None:
        assert not reasons
    elif last < 2:
        assert reasons
        assert fast.cache_info().captures == 0
    monkeypatch.undo()
    other = pygraph.jit(lambda x: torch.relu(x) + 1)
    assert torch.equal(other(x), torch.relu(x) + 1)
    assert other.cache_info().captures == 1
