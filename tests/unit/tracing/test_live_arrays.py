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
    assert fast.cache_info().captures == 1  # what is uploaded is of one dtype, and has one graph


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


RETURNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "array": lambda x: (x * 2).cpu().numpy(),
    "among others": lambda x: {"found": x.argmax(1).cpu().numpy(), "x": x + 1},
    "part": lambda x: (x * 2).cpu().numpy()[0],
    "no dimensions": lambda x: x.mean().cpu().numpy(),
    "what it knows": lambda x: [
        (a := x.cpu().numpy()),
        a.shape,
        a.dtype,
        isinstance(a, np.ndarray),
        a.astype("f8") / 2,
    ],
    "shared memory": lambda x: [(y := (x * 2).cpu()), y.numpy(), y.add_(1)],
    "tensor": lambda x: torch.from_numpy((x * 2).cpu().numpy()).to(x.device) + 1,
}

NEEDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "number": lambda x: float(x.cpu().numpy()[0, 0]),
    "function": lambda x: np.argmax((x * 2).cpu().numpy()),
    "write": lambda x: [(y := (x * 2).cpu().numpy()), y.__setitem__(0, 1)],
}


def described(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [described(one) for one in value]
    if isinstance(value, dict):
        return {key: described(one) for key, one in value.items()}
    return (type(value).__name__, value.tolist()) if isinstance(value, (np.ndarray, torch.Tensor)) else value


@pytest.mark.parametrize("name", [*RETURNED, *NEEDED])
def test_an_array_of_a_tensor_that_was_computed(device: torch.device, name: str) -> None:
    fn = RETURNED.get(name) or NEEDED[name]
    fast = pygraph.jit(fn)
    held: list[tuple[Any, Any]] = []
    for seed in range(5):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).to(device)
        held.append((fast(x), fn(x)))
    assert [described(got) for got, _ in held] == [described(expected) for _, expected in held]
    assert name in NEEDED or fast.cache_info().hits == 4


def test_arrays_that_are_stored(device: torch.device) -> None:
    class Agent:
        def __init__(self) -> None:
            self.last: Any = None
            self.log: list[Any] = []

        def act(self, x: torch.Tensor) -> torch.Tensor:
            self.last = (x * 2).cpu().numpy()
            self.log.append(x.sum(0).cpu().numpy())
            return x + 1

    eager, jitted = Agent(), Agent()
    fast = pygraph.jit(jitted.act)
    for seed in range(6):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).to(device)
        assert torch.equal(fast(x), eager.act(x))
        assert type(jitted.last) is np.ndarray
        assert described([jitted.last, jitted.log]) == described([eager.last, eager.log])


def test_a_tensor_of_which_there_is_no_array(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> Any:
        return x.cpu().numpy()

    fast = pygraph.jit(fn)
    for _ in range(3):
        x = torch.ones(2, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="requires grad"):
            fast(x)
        with pytest.raises(TypeError, match="BFloat16"):
            fast(torch.ones(2, device=device, dtype=torch.bfloat16))
