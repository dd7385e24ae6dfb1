"""In what calls that were compiled are unlike those before."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph

SCALE = 2.0


def cut(x: Tensor, length: int, name: str = "a", **others: Tensor) -> Tensor:
    return x[:length] * SCALE


Calls = Callable[[Any, Tensor], object]

CALLS: dict[str, tuple[Calls, str]] = {
    "value": (lambda fast, x: fast(x, 3), "args[1] is 3 and was 2"),
    "dtype": (lambda fast, x: fast(x.double(), 2), "args[0] has dtype torch.float64, was torch.float32"),
    "shape": (lambda fast, x: fast(x[:6], 2), "args[0] has shape (6, 4), was (9, 4)"),
    "strides": (lambda fast, x: fast(x.t().contiguous().t(), 2), "args[0] has strides (1, 9), was (4, 1)"),
    "static": (lambda fast, x: fast(x, 2, "b"), "the arguments have another structure"),
    "type": (lambda fast, x: fast(x, True), "args[1] is True and was an int"),
    "structure": (lambda fast, x: fast(x, 2, other=x), "the arguments have another structure"),
    "gradients": (lambda fast, x: no_grad(fast, x), "grad mode is another setting"),
}


def no_grad(fast: Any, x: Tensor) -> None:
    with torch.no_grad():
        fast(x, 2)


def lines(fast: Any) -> list[str]:
    return fast.explain_misses().splitlines()


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_unlike_the_one_before(device: torch.device, kind: str) -> None:
    call, told = CALLS[kind]
    fast, x = pygraph.jit(cut), torch.ones(9, 4, device=device)
    fast(x, 2)
    fast(x, 2)
    call(fast, x)
    first, second = lines(fast)
    assert re.fullmatch(
        r"cut: miss 1 \(test_misses.py:\d+\): the first call; recorded as 1 graph, in \d+.\d\d s", first
    )
    assert f": {told}; " in second


def test_the_most_alike_of_earlier_calls_counts(device: torch.device) -> None:
    fast, x = pygraph.jit(cut), torch.ones(9, 4, device=device)
    fast(x, 2)
    fast(x, 2, other=x)
    fast(x.double(), 2)
    assert "args[0] has dtype torch.float64, was torch.float32;" in lines(fast)[-1]


def test_what_a_function_reads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = pygraph.jit(cut), torch.ones(9, 4, device=device)
    fast(x, 2)
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    assert fast(x, 2)[0, 0] == 3
    assert "SCALE has changed; recorded as 1 graph" in lines(fast)[-1]


def test_what_was_compiled_has_gone(device: torch.device) -> None:
    fast, x = pygraph.jit(cut, max_graphs=1), torch.ones(9, 4, device=device)
    for length in (2, 3, 2):
        fast(x, length)
    assert "what was compiled for such calls is not there any more" in lines(fast)[-1]


def test_derived_functions_and_modules_tell_theirs(device: torch.device) -> None:
    model = torch.nn.Linear(4, 2, device=device)
    fast = pygraph.jit(model)
    fast(torch.ones(3, 4, device=device)).sum().backward()
    assert any(line.startswith("backward(Linear): miss 1") for line in lines(fast))
    assert lines(pygraph.jit(torch.sin)) == []


class Odd:
    """An object without a text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_objects_of_the_user_s_are_not_held(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, odd: x * 2, static_argnums=1), torch.ones(2, device=device)
    odd = Odd()
    there = weakref.ref(odd)
    fast(x, odd)
    fast(x, Odd())
    assert "args[1] is another object, a Odd;" in lines(fast)[-1]
    fast.cache_clear()
    del odd
    assert there() is None
    assert len(lines(fast)) == 2


def test_only_the_last_ones_are_remembered(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, k: x.numpy(force=True).sum() * k), torch.ones(2, device=device)
    for size in range(1, 80):
        fast(torch.ones(size, device=device), 2)
    assert len(lines(fast)) <= 64
    assert fast(x, 2) == 4
