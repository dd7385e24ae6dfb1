"""Objects with tensors that calls move, store and return: the very same as in eager, whoever else refers to them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from tests.steps import assert_same


class Node:
    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.next: Any = None


@dataclasses.dataclass
class State:
    value: Tensor
    log: list[Any] = dataclasses.field(default_factory=list)


def swap(kept: Any, x: Tensor, k: int) -> Tensor:
    kept.a, kept.b = kept.b, kept.a
    return x + kept.a.value


def swap_and_update(kept: Any, x: Tensor, k: int) -> Tensor:
    kept.a, kept.b = kept.b, kept.a
    for one in kept.pool:
        one.value = one.value + 1
    return kept.a.value * 1


def select(kept: Any, x: Tensor, k: int) -> Tensor:
    kept.current = kept.pool[k % 2]
    kept.current.value = kept.current.value + x
    return kept.current.value * 2


def link(kept: Any, x: Tensor, k: int) -> None:
    kept.b.value = x + 1
    kept.a.next = kept.b if k % 3 else None


def replace(kept: Any, x: Tensor, k: int) -> None:
    kept.state = dataclasses.replace(kept.state, value=x * 2)


def renew(kept: Any, x: Tensor, k: int) -> None:
    kept.state = State(kept.state.value + x, [])


def wrap(kept: Any, x: Tensor, k: int) -> State:
    kept.a.value = x * 1
    return State(x * 2, [kept.a])


def add(kept: Any, x: Tensor, k: int) -> Any:
    kept.a.value = kept.a.value + x
    return kept.a


@pytest.mark.parametrize("fn", [swap, swap_and_update, select, link, replace, renew, wrap, add])
def test_as_in_eager(device: torch.device, fn: Callable[..., Any]) -> None:
    def make(run: Callable[..., Any]) -> list[Any]:
        a, b = (Node(torch.full((3,), value, device=device)) for value in (1.0, 2.0))
        kept = types.SimpleNamespace(a=a, b=b, pool=[a, b], current=a, state=State(torch.ones(3, device=device)))
        log, found = kept.state.log, list[Any]()
        call = run(lambda x, k: fn(kept, x, k))
        for number in range(9):
            result = call(torch.full((3,), float(number), device=device), number)
            held = result.log if isinstance(result, State) else [result]
            places = [kept.a, kept.b, kept.current, a.next, *held]
            who = [one is a or (2 if one is b else False) for one in places if not isinstance(one, Tensor)]
            found.append((who, kept.state.log is log, a.value.clone(), b.value.clone(), kept.state.value.clone()))
            found.append(result.value if isinstance(result, (State, Node)) else result)
        return found

    assert_same(make(pygraph.jit), make(lambda call: call), device)
