"""Parts of NumPy arrays among the arguments, and what is computed of them, are uploaded as the arrays are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pygraph

pytestmark = pytest.mark.rotates

Array = np.ndarray[Any, Any]
Use = Callable[[Array], Any]

LIVE: dict[str, Use] = {
    "row": lambda a: a[0],
    "last row": lambda a: a[-1],
    "columns": lambda a: a[:, 1:],
    "every other": lambda a: a[::2, None],
    "the rest": lambda a: a[..., 0],
    "rows": lambda a: [row * 2 for row in a][1],
    "quotient": lambda a: a / 255.0,
    "reflected": lambda a: 1 / (a + 3.5),
    "sum": lambda a: 2 * a - 1,
    "transposed": lambda a: a.T,
    "axes": lambda a: a.transpose(1, 0),
    "reshaped": lambda a: a.reshape(-1, 2),
    "in one row": lambda a: a.ravel(),
    "flat copy": lambda a: a.flatten() * 3,
    "copy": lambda a: a.copy()[1:],
    "another dtype": lambda a: a.astype("float32") / 2,
    "a float64": lambda a: a.astype(np.float64)[:, 0],
}

BAKED: dict[str, Use] = {
    "number": lambda a: np.full(2, a[0, 0]),
    "mean": lambda a: a.mean(keepdims=True),
    "list": lambda a: a[[0, 1]],
    "mask": lambda a: a[a > 2],
    "array": lambda a: a + np.ones(4),
    "flipped": lambda a: a[::-1].copy(),
    "integers": lambda a: (a * 1.5).astype(np.int64),
    "order": lambda a: a.flatten("F"),
}


def outcomes(call: Callable[[Array], torch.Tensor], dtype: Any) -> list[tuple[torch.dtype, list[Any]]]:
    found = []
    for seed in range(5):
        result = call(np.random.default_rng(seed).integers(1, 9, (4, 4)).astype(dtype))
        found.append((result.dtype, result.tolist()))
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.uint8, np.int64], ids=lambda d: d.__name__)
@pytest.mark.parametrize("use", LIVE)
def test_one_graph_for_all_arrays(device: torch.device, use: str, dtype: Any) -> None:
    def fn(array: Array) -> torch.Tensor:
        return torch.as_tensor(LIVE[use](array), device=device) * 2

    fast = pygraph.jit(fn)
    assert outcomes(fast, dtype) == outcomes(fn, dtype)
    assert fast.cache_info().captures == 1


@pytest.mark.parametrize("use", BAKED)
def test_what_needs_the_values_runs_as_it_is(device: torch.device, use: str) -> None:
    def fn(array: Array) -> torch.Tensor:
        return torch.as_tensor(BAKED[use](array), device=device) * 2

    fast = pygraph.jit(fn)
    assert outcomes(fast, np.float32) == outcomes(fn, np.float32)
    assert fast.cache_info().captures == 0


@pytest.mark.parametrize("kind", [torch.FloatTensor, torch.Tensor, torch.LongTensor], ids=lambda kind: kind.__name__)
def test_types_that_make_tensors(device: torch.device, kind: Any) -> None:
    dtype = np.int64 if kind is torch.LongTensor else np.float32

    def fn(array: Array) -> torch.Tensor:
        return kind(array).to(device) * 2 + kind(array[0].astype(dtype)).to(device)

    fast = pygraph.jit(fn)
    for of in (dtype, np.uint8):
        assert outcomes(fast, of) == outcomes(fn, of)
    assert fast.cache_info().captures == 2


def test_writes_to_the_memory_of_a_part(device: torch.device) -> None:
    def fn(array: Array) -> torch.Tensor:
        torch.from_numpy(array[1:, 0]).add_(1)
        torch.FloatTensor(array[0]).mul_(2)
        torch.from_numpy(array.copy()).zero_()
        return torch.as_tensor(array, device=device) * 1

    fast = pygraph.jit(fn)
    for count in range(4):
        one, other = (np.full((3, 2), count, np.float32) for _ in range(2))
        assert fast(one).tolist() == fn(other).tolist()
        assert one.tolist() == other.tolist()
