"""Numbers with which a function computes on the host: whatever it asks of them, the answer is that of eager."""

from __future__ import annotations

import cmath
import copy
import decimal
import fractions
import itertools
import json
import math
import operator
import pickle
import statistics
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pygraph

NAMES = {0: "none", 1: "one", 2: "two", 3: "three"}
ITEMS = list(range(10))


def matched(k: Any) -> str:
    match k:
        case 1:
            return "one"
        case 2.0:
            return "two"
        case _:
            return "other"


def stored(k: Any) -> Any:
    array = np.zeros(2)
    array[0] = k
    return array


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "np.sqrt": np.sqrt,
    "np.exp of a computed one": lambda k: np.exp(k + 1),
    "np.maximum": lambda k: np.maximum(k, 1),
    "np.float32": np.float32,
    "np.int64": np.int64,
    "np.bool_": np.bool_,
    "np.array": np.array,
    "np.array of a dtype": lambda k: np.array(k, dtype=np.float32),
    "np.asarray of a list": lambda k: np.asarray([k, 1]),
    "its dtype in an array": lambda k: np.array(k).dtype.name,
    "np.full": lambda k: np.full(3, k),
    "np.isclose": lambda k: np.isclose(k, 1.0),
    "an array and it": lambda k: (np.arange(3) + k, k * np.arange(3), (np.arange(3) < k).tolist()),
    "NumPy numbers and it": lambda k: (np.float64(2) * k, k * np.int64(2), np.float32(2) + k, k - np.float32(2)),
    "np.clip": lambda k: np.clip(k, 0, 1),
    "np.linspace": lambda k: np.linspace(0, k, 3),
    "np.power": lambda k: np.power(k, 2),
    "np.where": lambda k: np.where(k > 1, 1.0, 0.0),
    "np.sum": lambda k: (np.sum([k, k]), np.mean([k, 2]), np.add.reduce([k, k])),
    "np.divmod": lambda k: np.divmod(k, 2),
    "np.dot": lambda k: np.dot(k, np.ones(2)),
    "np.interp": lambda k: np.interp(k, [0, 1, 2], [0, 10, 20]),
    "np.vectorize": lambda k: np.vectorize(lambda a: a * 2.0)(k),
    "np.isscalar": lambda k: (np.isscalar(k), np.ndim(k), np.shape(k)),
    "into an array": stored,
    "an array's item": lambda k: np.arange(10)[k],
    "math": lambda k: (math.sqrt(k), math.floor(k), math.ceil(k), math.trunc(k), math.log(k + 1), math.exp(k)),
    "more math": lambda k: (math.frexp(k), math.modf(k), math.copysign(k, -1), math.fsum([k, k]), math.erf(k)),
    "math of integers": lambda k: (math.gcd(int(k), 4), math.comb(5, int(k)), math.factorial(int(k))),
    "cmath": cmath.sqrt,
    "conversions": lambda k: (int(k), float(k), bool(k), complex(k), str(k), repr(k), f"{k:.2f}"),
    "round": lambda k: (round(k), round(k, 1), round(k * 2)),
    "abs": lambda k: (abs(k), -k, +k),
    "divmod": lambda k: (divmod(k, 2), divmod(7, k + 1), k // 2, k % 2),
    "powers": lambda k: (k**2, 2**k, k**0.5),
    "is_integer": lambda k: k.is_integer(),
    "parts": lambda k: (k.real, k.imag, k.conjugate()),
    "hex": lambda k: k.hex(),
    "bit_length": lambda k: (k.bit_length(), k.bit_count()),
    "to_bytes": lambda k: k.to_bytes(2, "big"),
    "a fraction's": lambda k: (k.numerator, k.denominator),
    "special methods": lambda k: (k.__float__(), k.__int__()),
    "hash": lambda k: (hash(k), hash(k * 2)),
    "an entry": lambda k: (NAMES[k], NAMES.get(k + 1), k in NAMES, k in [1, 2, 3], k in {1, 2, 3}),
    "an entry's key": lambda k: {k: 1, k + 1: 2},
    "a place in a list": lambda k: ([5, k].index(k), [1, 2, k].count(k)),
    "range": lambda k: (list(range(k)), sum(range(1, k + 1))),
    "slices": lambda k: (ITEMS[:k], ITEMS[k], ITEMS[k + 1], [1] * k, "ab" * k),
    "texts of integers": lambda k: (operator.index(k), chr(k + 65), bin(k), hex(k), oct(k), bytes(k)),
    "itertools": lambda k: (list(itertools.islice(ITEMS, k)), list(itertools.repeat(1, k))),
    "bits": lambda k: (1 << k, k << 1, k & 1, k | 4, ~k, k ^ 1),
    "decimal": lambda k: decimal.Decimal(k),
    "fractions": lambda k: (fractions.Fraction(k), fractions.Fraction(1, 2) + k),
    "statistics": lambda k: statistics.mean([k, 2]),
    "json": lambda k: json.dumps([k, k * 2]),
    "struct": lambda k: struct.pack("d", k),
    "copies": lambda k: (copy.copy(k), copy.deepcopy([k]), pickle.loads(pickle.dumps(k))),
    "max": lambda k: (max(k, 1), min(k, 1), sum([k, k, 1]), sorted([3, k, 0]), any([k]), not k),
    "comparisons": lambda k: (k == 2, k < 2, 0 < k < 5, k is None),
    "isinstance": lambda k: (isinstance(k, int), isinstance(k, float), isinstance(k, np.generic), callable(k)),
    "complex": lambda k: (1 + 2j) * k,
    "match": matched,
    "item": lambda k: k.item(),
    "astype": lambda k: k.astype(np.float32),
    "dtype": lambda k: (getattr(k, "dtype", "none"), hasattr(k, "item"), hasattr(k, "hex"), "real" in dir(k)),
    "nothing": lambda k: k.nothing,
    "called": lambda k: k(),
    "divided by nothing": lambda k: k / 0,
    "of a tensor": lambda k: torch.from_numpy(np.array([k, 1])),
    "a size": lambda k: torch.Size([k, 1]),
    "arange": lambda k: torch.arange(k),
}

VALUES: dict[str, tuple[Any, ...]] = {
    "int": (2, 3),
    "float": (1.5, 2.0),
    "bool": (True, False),
    "np.float32": (np.float32(1.5), np.float32(3)),
    "np.float64": (np.float64(1.5), np.float64(2)),
    "np.int64": (np.int64(2), np.int64(3)),
}


def described(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), [described(item) for item in value]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return type(value), str(value.dtype), value.tolist()
    return type(value), repr(value)


def outcome(fn: Callable[..., Any], x: torch.Tensor, k: Any) -> Any:
    try:
        return described(fn(x, k))
    except Exception as error:  # whatever eager raises
        return type(error), str(error)


@pytest.mark.pairwise(strength=1)
@pytest.mark.filterwarnings("ignore")  # NumPy's, of what has no value
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", QUESTIONS)
def test_every_answer_is_that_of_eager(name: str, kind: str, device: torch.device) -> None:
    question, x = QUESTIONS[name], torch.ones(3, device=device)

    def fn(x: torch.Tensor, k: Any) -> Any:
        return x * 2, question(k)

    fast = pygraph.jit(fn)
    for k in (*VALUES[kind], *VALUES[kind]):
        assert outcome(fast, x, k) == outcome(fn, x, k)


@pytest.mark.parametrize("name", ["np.sqrt", "NumPy numbers and it", "hash", "decimal", "json", "an entry"])
def test_what_asks_for_the_value_is_a_graph_for_each_value(name: str, device: torch.device) -> None:
    question, x = QUESTIONS[name], torch.ones(3, device=device)
    fast = pygraph.jit(lambda x, k: (x * k, question(k)), strict=True)
    for _ in range(3):
        for k in (2, 3):
            fast(x, k)
    assert fast.cache_info().captures == 2
    assert fast.cache_info().misses == 2


def test_a_number_beside_one_that_numpy_gets_stays_live(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    fast = pygraph.jit(lambda x, k, m: x * np.sqrt(k) + m, strict=True)
    for m in (1.0, 2.0, 3.0):
        assert torch.equal(fast(x, 4.0, m), x * 2 + m)
    assert fast.cache_info().misses == 1


def test_numbers_in_numpys_precision(device: torch.device) -> None:
    x = torch.ones(3, device=device, dtype=torch.float64)
    fast = pygraph.jit(lambda x, k: x * float(np.float32(k) / 3))
    assert torch.equal(fast(x, 1.0), x * float(np.float32(1.0) / 3))


def test_a_number_of_the_device_is_never_numpys(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * np.sqrt(x.sum().item())

    x = torch.full((4,), 4.0, device=device)
    fast = pygraph.jit(fn)
    for value in (4.0, 9.0, 4.0):
        assert torch.equal(fast(x * value), fn(x * value))


@pytest.mark.parametrize("power", ["x ** k", "_foreach_pow", "of the device"])
def test_exponents_are_those_of_eager(device: torch.device, power: str) -> None:
    """For some, torch has kernels of their own: a root of minus infinity is none, where a power would be infinite."""
    functions: dict[str, Any] = {
        "x ** k": lambda x, k: x**k,
        "_foreach_pow": lambda x, k: torch._foreach_pow([x, x + 1], k)[0],
        "of the device": lambda x, k: x ** torch.tensor(k).to(device).item(),
    }
    fn = functions[power]
    fast = pygraph.jit(fn)
    x = torch.tensor([-math.inf, -0.0, 3.3, 0.1, math.nan, 7.0], device=device)
    for k in (2.5, 0.5, 3, -0.5, -1.0, 2, 0, 0.5, 1.0, -2.0):
        torch.testing.assert_close(fast(x, k), fn(x, k), rtol=0, atol=0, equal_nan=True)
