"""Containers that a call leaves with the same items, in another order or under keys that it has put again."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph

Made = tuple[Any, Callable[[Tensor], Any]]


def the_only_key() -> Made:
    """The same order, and a key of the trace's own until it is put back."""
    seen = {1: "a"}

    def fn(x: Tensor) -> Tensor:
        for u in x.tolist():
            if u in seen:
                seen[u] = seen.pop(u)
        return x + 1

    return seen, fn


def a_key_that_is_put_again() -> Made:
    seen = {"a": 1, "b": 2}

    def fn(x: Tensor) -> Tensor:
        seen["a"] = seen.pop("a")
        return x + 1

    return seen, fn


def the_first_key() -> Made:
    seen = {"a": 1, "b": 2}

    def fn(x: Tensor) -> Tensor:
        key = next(iter(seen))
        seen[key] = seen.pop(key)
        return x + seen[key]

    return seen, fn


def a_new_key_between() -> Made:
    seen: dict[Any, int] = {"a": 1, "b": 2}

    def fn(x: Tensor) -> Tensor:
        seen[len(seen)] = 0
        seen["b"] = seen.pop("b")
        return x + len(seen)

    return seen, fn


def an_ordered_dict() -> Made:
    seen = collections.OrderedDict(a=1, b=2, c=3)

    def fn(x: Tensor) -> Tensor:
        seen.move_to_end(next(iter(seen)))
        return x * next(iter(seen.values()))

    return seen, fn


def least_recently_used() -> Made:
    seen: dict[int, int] = {}

    def fn(x: Tensor) -> Tensor:
        for u in torch.unique(x).tolist():
            if u in seen:
                seen[u] = seen.pop(u)
            else:
                if len(seen) > 3:
                    seen.pop(next(iter(seen)))
                seen[u] = 1
        return x + 1

    return seen, fn


def a_deque() -> Made:
    seen = collections.deque([1, 2, 3])

    def fn(x: Tensor) -> Tensor:
        for u in x.tolist():
            if u in seen:
                seen.remove(u)
                seen.append(u)
        return x + 1

    return seen, fn


def a_set() -> Made:
    seen = {1, 2, 3}

    def fn(x: Tensor) -> Tensor:
        for u in x.tolist():
            if u in seen:
                seen.remove(u)
                seen.add(u)
        return x + 1

    return seen, fn


def a_list() -> Made:
    seen = [1, 2, 3]

    def fn(x: Tensor) -> Tensor:
        for i, u in enumerate(x.tolist()):
            if u == seen[i % 3]:
                seen[i % 3] = u
        return x + 1

    return seen, fn


CASES = [
    the_only_key, a_key_that_is_put_again, the_first_key, a_new_key_between, an_ordered_dict, least_recently_used,
    a_deque, a_set, a_list,
]  # fmt: skip
CALLS = ([1, 0, 3], [1, 0, 3], [6, 2, 1, 1], [2, 2, 6, 6, 5], [4, 4, 0, 6, 5, 4], [6, 5, 5], [3, 1, 1, 6], [1, 2, 3])


@pytest.mark.rotates
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_as_in_eager(device: torch.device, make: Callable[[], Made]) -> None:
    (seen, fn), (mine, other) = make(), make()
    fast = pygraph.jit(other)
    for call in CALLS:
        x = torch.tensor(call, device=device)
        assert torch.equal(fast(x), fn(x))
        (found, expected) = (list(one.items()) if isinstance(one, dict) else list(one) for one in (mine, seen))
        assert found == expected
        assert all(type(item) in (int, str) for item in mine)


def test_long_containers_that_stay_as_they_are(device: torch.device) -> None:
    """Positions from 257 on are other objects each time."""
    numbers, names = list(range(1000)), {f"k{n}": n for n in range(1000)}

    def fn(x: Tensor) -> Tensor:
        return x * len(numbers) + len(names)

    fast, x = pygraph.jit(fn, strict=True), torch.ones(3, device=device)
    for _ in range(3):
        assert torch.equal(fast(x), fn(x))
    assert fast.cache_info().misses == 1
