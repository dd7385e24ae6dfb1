"""Lists of numbers that are others at every call: as tensors, as indices, and item by item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import BatchSampler, SubsetRandomSampler

import pygraph

CALLS = 7

Function = Callable[[Tensor, list[Any]], Any]

OF_INTEGERS: dict[str, Function] = {
    "tensor": lambda x, values: x[:4, 0] * torch.tensor(values).to(x.device),
    "on the device": lambda x, values: torch.tensor(values, device=x.device) * 2,
    "of a dtype": lambda x, values: x[:4, 0] * torch.as_tensor(values, dtype=torch.float64).to(x.device),
    "like another": lambda x, values: x[:4, 0] * x.new_tensor(values),
    "nested": lambda x, values: x[:2, :3] + torch.tensor([values[:3], [1, values[0], 2]], device=x.device),
    "in a tuple": lambda x, values: torch.tensor((values[0], 1, values[2]), device=x.device),
    "index": lambda x, values: x[values] * 2,
    "one of several indices": lambda x, values: x[values, 1] + x[values[:2], :2].sum(),
    "assignment": lambda x, values: torch.index_fill(x, 0, torch.tensor(values).to(x.device), 7.0),
    "items": lambda x, values: sum(x[one] for one in values) * len(values),
    "loop": lambda x, values: [x[one] * k for k, one in enumerate(reversed(values))],
    "parts": lambda x, values: x[values[1:]] * values[0],
    "sorted": lambda x, values: x[sorted(values)],
    "tested": lambda x, values: x * (2 if 3 in values else 5),
    "joined": lambda x, values: x[[*values, 0]] + x[[1] + values],  # noqa: RUF005
}  # fmt: skip
OF_FLOATS: dict[str, Function] = {
    "tensor": lambda x, values: x[:4, 0] * torch.tensor(values).to(x.device),
    "half": lambda x, values: torch.tensor(values, dtype=torch.float16, device=x.device) * 2,
    "with integers": lambda x, values: torch.tensor([1, values[0], 2], device=x.device) * 2,
    "returns": lambda x, values: torch.tensor(discounted(values), device=x.device) - x[:4, 0],
    "maximum": lambda x, values: x * max(values),
}


def discounted(rewards: list[float]) -> list[float]:
    found: list[float] = []
    total = 0.0
    for reward in reversed(rewards):
        total = reward + 0.9 * total
        found.insert(0, total)
    return found


def check(function: Function, make: Callable[[int], list[Any]], device: torch.device) -> Any:
    fast, x = pygraph.jit(function), torch.linspace(-1, 1, 24, device=device).view(8, 3)
    for k in range(CALLS):
        values = make(k)
        found = fast(x + k, values)
        assert_close(found, function(x + k, values))
        assert values == make(k)
    return fast


@pytest.mark.parametrize("kind", OF_INTEGERS)
def test_integers_of_a_list_are_live(device: torch.device, kind: str) -> None:
    fast = check(OF_INTEGERS[kind], lambda k: np.random.default_rng(k).permutation(8)[:4].tolist(), device)
    if kind not in ("sorted", "tested", "joined"):
        assert fast.cache_info().captures <= 3


@pytest.mark.parametrize("kind", OF_FLOATS)
def test_floats_of_a_list_are_live(device: torch.device, kind: str) -> None:
    fast = check(OF_FLOATS[kind], lambda k: np.random.default_rng(k).random(4).tolist(), device)
    if kind != "maximum":
        assert fast.cache_info().captures <= 2


@pytest.mark.parametrize("kind", ["index", "tensor", "tested", "items"])
def test_long_lists(device: torch.device, kind: str) -> None:
    """So many numbers are no arguments of their own: a tensor stands for them, or they are read."""
    x, fast = torch.linspace(-1, 1, 8, device=device).view(8, 1), pygraph.jit(OF_INTEGERS[kind])
    if kind == "tensor":
        fast = pygraph.jit(lambda x, values: torch.tensor(values, dtype=torch.float32, device=x.device) * x[0])
    if kind == "items":
        fast = pygraph.jit(lambda x, values: x * (values[3] + len(values)))
    for k in range(5):
        values = np.random.default_rng(k).integers(0, 8, 1100).tolist()
        assert_close(fast(x, values), fast.__wrapped__(x, values))
    if kind in ("index", "tensor", "items"):
        assert fast.cache_info().captures <= 2


def test_a_list_is_returned_and_changed_by_others(device: torch.device) -> None:
    def select(x: Tensor, values: list[int]) -> tuple[Tensor, list[int]]:
        return x[values], values

    fast, x = pygraph.jit(select), torch.linspace(-1, 1, 8, device=device)
    values = [1, 2, 3]
    for k in range(CALLS):
        found, same = fast(x, values)
        assert same is values
        assert_close(found, x[values])
        values[k % 3] = k
    values.append(3)
    assert_close(fast(x, values)[0], x[values])


@given(st.lists(st.lists(st.integers(0, 7), max_size=5), min_size=3, max_size=6), st.sampled_from([0, 1, 2]))
@settings(max_examples=15)
def test_lists_of_all_lengths(device: torch.device, lists: list[list[int]], way: int) -> None:
    ways: list[Function] = [
        lambda x, values: x[values],
        lambda x, values: torch.tensor(values, dtype=torch.float32, device=x.device) + 1,
        lambda x, values: x.index_select(0, torch.tensor(values, dtype=torch.int64).to(x.device)),
    ]
    fast, x = pygraph.jit(ways[way]), torch.linspace(-1, 1, 24, device=device).view(8, 3)
    for values in lists:
        assert_close(fast(x, values), ways[way](x, values))


SAMPLES: dict[str, Callable[[int], Any]] = {
    "permutation": lambda n: torch.randperm(n).tolist(),
    "parts": lambda n: torch.randperm(n).view(2, -1).tolist()[0],
    "range": lambda n: list(SubsetRandomSampler(range(n))),
    "range with steps": lambda n: list(SubsetRandomSampler(range(1, n, 2))),
    "list": lambda n: list(SubsetRandomSampler([n - 1, 2, 5])),
    "batches": lambda n: next(iter(BatchSampler(SubsetRandomSampler(range(n)), 3, drop_last=True))),
    "last batches": lambda n: list(BatchSampler(SubsetRandomSampler(range(n)), 3, drop_last=False))[-1],
    "generator": lambda n: list(SubsetRandomSampler(range(n), torch.Generator().manual_seed(3))),
    "numpy": lambda n: (torch.randperm(n) + 1).numpy().tolist()[: n // 2],
    "item": lambda n: [torch.randperm(n)[:1].numpy().item(), 2],
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_indices_that_a_function_draws_are_live(device: torch.device, kind: str) -> None:
    def select(x: Tensor) -> Tensor:
        return x[SAMPLES[kind](8)] * 2

    fast, x = pygraph.jit(select), torch.linspace(-1, 1, 27, device=device).view(9, 3)
    found: list[Tensor] = []
    for function in (fast, select):
        torch.manual_seed(0)
        found += [function(x + k) for k in range(CALLS)]
    for one, other in zip(found[:CALLS], found[CALLS:], strict=True):
        assert_close(one, other)
    if kind != "generator":
        assert fast.cache_info().captures == 1


def test_a_minibatch_loop_is_traced_once(device: torch.device) -> None:
    models = [torch.nn.Linear(3, 2).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in models]

    def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
        total = 0.0
        for indices in BatchSampler(SubsetRandomSampler(range(8)), 4, drop_last=True):
            loss = (model(x[indices]) - y[indices]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total

    fast = pygraph.jit(update)
    for k in range(CALLS):
        x, y = torch.linspace(-1, 1, 24, device=device).view(8, 3) + k, torch.ones(8, 2, device=device)
        results: list[float] = []
        for function, model, optimizer in zip((fast, update), models, optimizers, strict=True):
            torch.manual_seed(k)
            results.append(function(model, optimizer, x, y))
        assert results[0] == pytest.approx(results[1])
    assert_close(models[0].weight, models[1].weight)
    assert len([line for line in fast.explain_misses().splitlines() if "recorded" in line]) == 1


@pytest.mark.parametrize("read", [False, True])
def test_lists_that_decide_are_one_tensor(device: torch.device, read: bool) -> None:
    """Once numbers have decided by what torch does with them, a tensor stands for them; unless they are read."""

    def select(x: Tensor, values: list[int]) -> Tensor:
        found = x[torch.tensor(values, dtype=torch.int32, device=x.device).long()]
        return found * 2 if read and values[0] > 3 else found

    fast, x = pygraph.jit(select), torch.linspace(-1, 1, 8, device=device)
    for k in range(CALLS):
        values = np.random.default_rng(k).integers(0, 8, 20).tolist()
        assert_close(fast(x, values), select(x, values))
