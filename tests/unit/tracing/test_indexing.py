"""Reading by integers of which only a run knows the value, as the position of a cache that a tensor holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph

LIST = torch.tensor([2, 0])
READ: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "alone": lambda x, k: x[k],
    "second": lambda x, k: x[:, k],
    "last": lambda x, k: x[..., k],
    "after an ellipsis": lambda x, k: x[..., k, 1:],
    "before an ellipsis": lambda x, k: x[k, ..., 1],
    "beside a new dimension": lambda x, k: x[None, k, :, None],
    "twice": lambda x, k: x[k, :, k],
    "beside a list of positions": lambda x, k: x[LIST.to(x.device), k],
    "before a list of positions": lambda x, k: x[k, LIST.to(x.device)],
    "before a mask": lambda x, k: x[k, :, torch.arange(4, device=x.device) < 2].sum(-1),
    "beside known ones": lambda x, k: x[1, k, -1],
    "view that is written": lambda x, k: x[k].mul_(2).sum() + x,
}


@pytest.mark.parametrize("kind", ["device", "cpu", "item", "int32"])
@pytest.mark.parametrize("name", READ)
def test_reading_at_an_unknown_position(device: torch.device, name: str, kind: str) -> None:
    def function(x: Tensor, k: Tensor) -> Tensor:
        return READ[name](x * 2, k.item() if kind == "item" else k) + 1

    fast = pygraph.jit(function)
    x = torch.arange(36.0, device=device).view(3, 3, 4)
    for number in (0, 2, -1, 1, -3, 0):
        k = torch.tensor(number, device="cpu" if kind == "cpu" else device)
        k = k.int() if kind == "int32" else k
        torch.testing.assert_close(fast(x, k), function(x, k), rtol=0, atol=0)
    with pytest.raises(IndexError):
        fast(x, torch.tensor(9, device=k.device, dtype=k.dtype))
    assert fast.cache_info().captures > 0


def test_bytes_are_masks(device: torch.device) -> None:
    def kept(x: Tensor) -> Tensor:
        suppressed = torch.max(torch.zeros(4, dtype=torch.uint8, device=device), (x > 0).to(torch.uint8))
        return x[1 - suppressed]

    fast = pygraph.jit(kept)
    for number in range(4):
        x = torch.tensor([1.0, -1.0, 2.0, -2.0], device=device).roll(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of bytes as indices
            torch.testing.assert_close(fast(x), kept(x))
    assert not any("index" in one["reason"] for one in fast.explain().to_dict()["fallbacks"])


@pytest.mark.parametrize("scatter", [torch.select_scatter, torch.slice_scatter])
def test_scattering_counts_from_the_end(device: torch.device, scatter: Any) -> None:
    x = torch.arange(12.0, device=device).view(4, 3)

    def written(k: int) -> Tensor:
        if scatter is torch.slice_scatter:
            return torch.slice_scatter(x, x[:1] * 5 + 1, 0, k)[:2] if k in (3, -1) else x
        return torch.select_scatter(x, x[0] * 5 + 1, 0, k)

    fast = pygraph.jit(written)
    for k in (0, 1, 3, -1, 2, -2, -4, 3):
        torch.testing.assert_close(fast(k), written(k))
