"""Functions of ``math`` on live numbers: live by whatever name they are called, and themselves to all other code."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import operator
import pickle
import threading
import types
from collections.abc import Callable
from math import ceil, comb, cos, exp, floor, frexp, fsum, gcd, isclose, isnan, log, modf, sqrt
from typing import Any

import pytest
import torch

import pygraph
from pygraph.tracing.math_functions import math_served
from tests.leftovers import nothing_patched
from tests.sources import execute


class Holder:
    """An object and a class that hold functions."""

    root = sqrt

    def __init__(self) -> None:
        self.cosine = cos


holder, table, partial = Holder(), {"log": log}, functools.partial(log, 7)
inner = types.ModuleType("inner")
execute("from math import cos\ndef halved(k):\n    return cos(k) / 2\n", vars(inner))


def closed_over() -> Callable[[torch.Tensor, Any], torch.Tensor]:
    root = sqrt
    return lambda x, k: x * root(k)


def default(x: torch.Tensor, k: Any, root: Any = sqrt, *, cosine: Any = cos) -> torch.Tensor:
    return x * root(k) + cosine(k)


HELD: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "variable of the module": lambda x, k: x * sqrt(k),
    "variable of another module": lambda x, k: x * inner.halved(k),
    "closure": closed_over(),
    "defaults": default,
    "class": lambda x, k: x * Holder.root(k),
    "object": lambda x, k: x * holder.cosine(k),
    "dict": lambda x, k: x * table["log"](k),
    "partial": lambda x, k: x * partial(k + 1),
    "map": lambda x, k: x * sum(map(sqrt, [k, k + 1])),
    "import inside": lambda x, k: x * __import__("math").sqrt(k),
}

COMPUTED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "with a base": lambda x, k: x * log(k, 2),
    "of each other": lambda x, k: x * sqrt(exp(cos(k))),
    "rounded": lambda x, k: x * floor(k / 3) + ceil(k / 4),
    "integers": lambda x, k: x * gcd(k, 12) + comb(k, 2),
    "list": lambda x, k: x * fsum([k, 0.1, 0.2]),
    "tuples": lambda x, k: x * math.dist((k, 1), (0, 2)),
    "parts": lambda x, k: x * frexp(k)[0] + modf(k / 3)[1] * frexp(k)[1],
    "bits": lambda x, k: x * sqrt(k & 7 | 1 ^ 2) + (k << 1) + (k >> 1) - (1 << k),
    "inverted": lambda x, k: x * ~k,
    "methods": lambda x, k: x * k.bit_length() + (k / 4).as_integer_ratio()[1],
}

DECIDED: dict[str, tuple[Callable[[torch.Tensor, Any], torch.Tensor], int]] = {
    "no number": (lambda x, k: x * 2 if isnan(k) else x * 3, 1),
    "close": (lambda x, k: x * 2 if isclose(k, 4, rel_tol=0.3) else x * 3, 2),
    "bit": (lambda x, k: x * 2 if k & 1 else x * 3, 2),
    "integer": (lambda x, k: x * 2 if (k / 2).is_integer() else x * 3, 2),
}


def check(function: Callable[..., Any], device: torch.device, captures: int) -> None:
    """Compare calls with ten numbers with eager's, by so many graphs at most, besides the first number's."""
    fast = pygraph.jit(function)
    x = torch.arange(3.0).to(device)
    for k in range(1, 11):
        torch.testing.assert_close(fast(x, k), function(x, k), rtol=0, atol=0)
    assert fast.cache_info().captures <= captures + 1
    assert fast.explain().to_dict()["fallbacks"] == []


@pytest.mark.parametrize("name", HELD)
def test_functions_that_are_held_by_name(device: torch.device, name: str) -> None:
    check(HELD[name], device, 1)


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_numbers(device: torch.device, name: str) -> None:
    check(COMPUTED[name], device, 1)


@pytest.mark.parametrize("name", DECIDED)
def test_decisions(device: torch.device, name: str) -> None:
    function, paths = DECIDED[name]
    check(function, device, paths)


def test_a_function_that_is_an_argument(device: torch.device) -> None:
    def function(x: torch.Tensor, k: int, of: Callable[[float], float]) -> torch.Tensor:
        return x * of(k)

    fast = pygraph.jit(function)
    x = torch.arange(3.0).to(device)
    for of in (sqrt, cos):
        for k in range(1, 8):
            assert torch.equal(fast(x, k, of), function(x, k, of))
    assert fast.cache_info().captures <= 4


# ---- a function is still itself ------------------------------------------------------------------------------------

_NAMES_OF = {math.sqrt: 2, math.cos: 3}

SAME: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "identity": lambda x, k: x * k * (2 if sqrt is math.sqrt else 3),
    "identity in a container": lambda x, k: x * k * (2 if table["log"] is math.log else 3),
    "key": lambda x, k: x * k * _NAMES_OF[math.sqrt] + _NAMES_OF[cos],
    "class": lambda x, k: x * k * (2 if inspect.isbuiltin(sqrt) and isinstance(cos, types.BuiltinFunctionType) else 3),
    "names": lambda x, k: x * k * len(sqrt.__name__ + (math.log.__doc__ or "") + math.log.__module__ + repr(cos)),
    "pickled": lambda x, k: x * k * len(pickle.dumps(sqrt)),
    "copied": lambda x, k: x * k * (2 if copy.deepcopy(sqrt) is math.sqrt else 3),
    "returned": lambda x, k: (x * k, math.sqrt, [cos]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_functions_are_themselves(device: torch.device, name: str) -> None:
    function = SAME[name]
    fast = pygraph.jit(function, strict=True)
    x = torch.arange(3.0).to(device)
    for k in (1, 2, 3):
        expected, got = function(x, k), fast(x, k)
        if isinstance(expected, tuple):
            assert got[1] is math.sqrt
            assert got[2][0] is math.cos
            expected, got = expected[0], got[0]
        assert torch.equal(got, expected)


def test_a_function_that_is_stored(device: torch.device) -> None:
    def function(x: torch.Tensor, k: int) -> torch.Tensor:
        holder.cosine = math.sin if k > 2 else math.cos
        return x * holder.cosine(k)

    fast = pygraph.jit(function)
    x = torch.arange(3.0).to(device)
    for k in (1, 2, 3, 4, 2, 5):
        assert torch.equal(fast(x, k), function(x, k))
        fast(x, k)
        assert holder.cosine is (math.sin if k > 2 else math.cos)
    holder.cosine = cos


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left(device: torch.device, fails: bool) -> None:
    held = table["log"], Holder.__dict__["root"], holder.cosine, default.__defaults__, sqrt

    def function(x: torch.Tensor, k: int) -> torch.Tensor:
        y = default(x, k) * table["log"](k) + Holder.root(k) + holder.cosine(k)
        if fails:
            raise KeyError(k)
        return y

    with nothing_patched():
        for k in (1, 2):
            try:
                pygraph.jit(function)(torch.ones(2, device=device), k)
            except KeyError:
                assert fails
    now = table["log"], Holder.__dict__["root"], holder.cosine, default.__defaults__, sqrt
    assert all(map(operator.is_, now, held))


def test_other_threads_meanwhile() -> None:
    """They get what the function returns, and its errors."""
    found: list[Any] = []

    def compute() -> None:
        found.append([sqrt(2), math.sqrt(2), math.isclose(1, 1.1, rel_tol=0.2), math.log(8, 2), math.fsum([0.1] * 10)])
        wrong: list[Any] = [
            lambda: math.sqrt(-1),
            lambda: math.sqrt("2"),
            lambda: math.isclose(1),
            lambda: math.cos(x=1),
        ]
        for call in wrong:
            with pytest.raises((ValueError, TypeError)) as raised:
                call()
            found.append(str(raised.value))

    for served in (False, True):
        thread = threading.Thread(target=compute)
        if served:
            with math_served():
                thread.start()
                thread.join()
        else:
            thread.start()
            thread.join()
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_a_replaced_function_is_left_alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "tan", lambda k: k * 2)
    check(lambda x, k: x * math.tan(k), device, 1)
