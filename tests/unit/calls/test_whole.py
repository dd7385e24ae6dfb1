"""Functions as a whole: graphs that win one by one and lose together give way to ordinary launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph


def parted(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Two graphs, between which the host needs to know how many values there are."""
    total.add_(x.sum())
    few = (x * 2)[x > 1] + 1
    return few.relu().sum() + total * 3


def timer(graphs_us: float) -> Any:
    def time(run: Any) -> float:
        run()
        return {"launch": 100.0, "the whole by launch": 200.0, "the whole by graphs": graphs_us}.get(run.way, 10.0)

    return time


@pytest.mark.parametrize(("graphs_us", "way"), [(20.0, "patch"), (199.9, "patch"), (300.0, "launch")])
def test_the_whole_decides(device: torch.device, graphs_us: float, way: str) -> None:
    fn = pygraph.select(pygraph.graphify(pygraph.indirect(parted)), timer=timer(graphs_us))
    total, expected = torch.zeros((), device=device), torch.zeros((), device=device)
    for n in range(4):
        x = torch.arange(6.0, device=device) + n
        assert torch.equal(fn(x, total), parted(x, expected))
        assert torch.equal(total, expected)
    regions = [region for region in fn.explain().to_dict()["regions"] if region["kind"] == "graph"]
    assert len(regions) >= 2
    assert {region["way"] for region in regions} == {way}
    if way == "launch":
        assert "the whole function was faster by ordinary launches" in regions[0]["selection"]["reason"]


def test_what_has_an_effect_is_not_repeated(device: torch.device) -> None:
    seen: list[str] = []

    def time(run: Any) -> float:
        run()
        seen.append(run.way)
        return 10.0

    def checked(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2)[x > 1]
        torch._assert_async((y.sum() > 0).cpu())
        return y.sum() + x

    fn = pygraph.select(pygraph.graphify(pygraph.indirect(checked)), timer=time)
    x = torch.arange(6.0, device=device)
    torch.testing.assert_close(fn(x), checked(x))
    assert not any("whole" in way for way in seen)


def test_one_region_is_the_whole(device: torch.device) -> None:
    seen: list[str] = []

    def time(run: Any) -> float:
        run()
        seen.append(run.way)
        return 10.0

    pygraph.select(pygraph.graphify(pygraph.indirect(torch.exp)), timer=time)(torch.ones(3, device=device))
    assert seen
    assert not any("whole" in way for way in seen)
