"""Numbers in tensors on the host, which native replays read themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pygraph
from pygraph.process import extension
from tests.unit.native.test_replay import Fake, check, replayed
from tests.unit.native.test_replay import fake as fake  # a fixture

pytestmark = pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))

FLOATS = [0.5, -0.0, 0.0, -7.25, 1e30, math.inf, -math.inf, 2.0]
INTEGERS = [3, -1, 0, 2**31 - 1, 5, -128]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_floats(fake: Fake, dtype: torch.dtype) -> None:
    x = torch.linspace(1, 2, 5, device="emu")
    values = [torch.tensor(value, dtype=dtype) for value in FLOATS]
    check(lambda x, k: x * k, [(x, k) for k in (*values, *values)])
    check(lambda x, k: x.double() + k, [(x, k) for k in values])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers(fake: Fake, dtype: torch.dtype) -> None:
    x = torch.arange(5, device="emu")
    info = torch.iinfo(dtype)
    values = [torch.tensor(min(max(value, info.min), info.max), dtype=dtype) for value in INTEGERS]
    check(lambda x, k: x + k, [(x, k) for k in values])
    check(lambda x, k: x.float() * k, [(x, k) for k in values])


def test_booleans(fake: Fake) -> None:
    x = torch.arange(5, device="emu")
    values = [torch.tensor(value) for value in (True, False, True, False)]
    check(lambda x, k: x * k, [(x, k) for k in values])
    check(lambda x, k: x.logical_xor(k), [(x, k) for k in values])


def test_a_number_too_large_for_a_signed_integer_is_read_in_python(fake: Fake) -> None:
    x = torch.ones(3, device="emu")
    values = [torch.tensor(value, dtype=torch.uint64) for value in (1, 2**63, 2**64 - 1, 5)]
    check(lambda x, k: x.double() * k, [(x, k) for k in values], native=0)
    check(torch.add, [(x, x)] * 3)


def test_a_tensor_that_the_caller_updates(fake: Fake) -> None:
    x, k = torch.arange(4.0, device="emu"), torch.tensor(2.0, dtype=torch.float64)
    function = pygraph.jit(lambda x, k: x / k)
    for value in (2.0, 4.0, 0.5, 8.0, 3.0):
        k.fill_(value)
        torch.testing.assert_close(function(x, k), x / k)
    assert replayed(function) == 3
    array = torch.arange(6.0, dtype=torch.float64)
    for element in array[1:]:  # views at other addresses
        torch.testing.assert_close(function(x, element), x / element)


def test_a_captured_tensor(fake: Fake) -> None:
    x, k = torch.arange(4.0, device="emu"), torch.tensor(2.0)
    function = pygraph.jit(lambda x: x / k)
    for value in (2.0, 4.0, 0.5, 8.0, 3.0):
        k.fill_(value)
        torch.testing.assert_close(function(x), x / k)
    assert replayed(function) == 3
    k.data = torch.tensor(16.0)
    for _ in range(3):
        torch.testing.assert_close(function(x), x / 16)


def test_many_tensors_and_one_graph(fake: Fake) -> None:
    def fn(x: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        for scale in scales:
            x = torch.tanh(x / scale)
        return x

    x = torch.arange(4.0, device="emu")
    calls: list[tuple[Any, ...]] = [(x, *(torch.tensor(i + j + 1.0) for j in range(6))) for i in range(6)]
    check(fn, calls)
    assert len(fake.launches) == 4
