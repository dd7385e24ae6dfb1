"""Work of the host ahead of a graph: a native replay calls it for its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph
from pygraph.process import extension
from tests.unit.native.test_replay import Fake, check, replayed
from tests.unit.native.test_replay import fake as fake  # a fixture

pytestmark = pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))

Tensor = torch.Tensor


def vector() -> Tensor:
    return torch.randn(5, device="emu")


def test_arithmetic_on_tensors(fake: Fake) -> None:
    values = [torch.tensor(value, dtype=torch.float64) for value in (2.0, 3.0, -1.0, 0.0, 5.0, 0.25)]
    check(
        lambda x, k: x / (k.sqrt() * 2 + 1), [(vector(), k) for k in values[:2]] + [(vector(), k) for k in values[4:]]
    )
    check(lambda x, k: x / (k.exp() * 2 + 1), [(vector(), k) for k in values])
    check(lambda x, k, i: x * (k.cos() + 1) + (i * 2), [(vector(), k, torch.tensor(n)) for n, k in enumerate(values)])
    check(lambda x, ks: x * ks[1] + ks[0], [(vector(), torch.tensor([n, 2.0 * n])) for n in range(5)])
    check(lambda x, k: torch.where(k > 0, x, -x), [(vector(), torch.tensor(n - 2.0)) for n in range(5)])


def test_arithmetic_on_numbers(fake: Fake) -> None:
    check(lambda x, k: x * (k * 2 + 1), [(vector(), k) for k in (0.5, 1.5, -2.0, 3.25)])
    check(lambda x, k: x * (k * 2 + 1), [(vector(), k) for k in (1, 2, 3, 4)])
    check(lambda x, k, t: x * (k * 2) / (t * k), [(vector(), k, torch.tensor(k)) for k in (1.5, 2.5, 3.5, 4.5)])


def test_captured_tensors_and_views(fake: Fake) -> None:
    k, table = torch.tensor(2.0), torch.arange(4.0)
    function = pygraph.jit(lambda x, i: x / (k * 2) + table[2] * i)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        k.fill_(value)
        table.add_(1)
        x = vector()
        torch.testing.assert_close(function(x, value), x / (k * 2) + table[2] * value)
    assert replayed(function) == 3


def test_a_call_with_gradients_inside(fake: Fake) -> None:
    def fn(x: Tensor, k: Tensor) -> Any:
        return torch.func.grad(lambda x: (x.sin() / (k * 2)).sum())(x)

    check(fn, [(vector(), torch.tensor(n + 1.0)) for n in range(5)])


def test_integers_that_no_parameter_holds(fake: Fake) -> None:
    """A product of numbers may be larger than what was passed: Python finds out what eager does."""
    function = pygraph.jit(lambda x, k: x * (k * k))
    for k in (2, 3, 4, 5):
        x = vector()
        torch.testing.assert_close(function(x, k), x * (k * k))
    assert replayed(function) == 2


def test_an_error(fake: Fake) -> None:
    """It comes where Python makes the call again, once, and nothing has been launched."""

    def fn(x: Tensor, ks: Tensor, i: Tensor) -> Tensor:
        return x * ks[i].sum()

    function = pygraph.jit(fn)
    ks = torch.arange(4.0)
    for i in (1, 2, 3, 0):
        x = vector()
        torch.testing.assert_close(function(x, ks, torch.tensor([i])), x * ks[i])
    launches = len(fake.launches)
    with pytest.raises(IndexError):
        function(vector(), ks, torch.tensor([7]))
    assert len(fake.launches) == launches


@pytest.mark.parametrize("before", [True, False])
def test_updates_are_made_once(fake: Fake, before: bool) -> None:
    def fn(x: Tensor, k: Tensor) -> Tensor:
        if before:
            k.add_(1)
        y = x * (k * 2)
        if not before:
            k.add_(1)
        return y

    function, k, other = pygraph.jit(fn), torch.tensor(1.0), torch.tensor(1.0)
    for _ in range(5):
        x = vector()
        torch.testing.assert_close(function(x, k), fn(x, other))
        torch.testing.assert_close(k, other)
    assert replayed(function) == 0
    check(torch.add, [(x, x)] * 3)


def test_random_numbers_of_the_host_are_drawn_once(fake: Fake) -> None:
    def fn(x: Tensor) -> Tensor:
        return x * (torch.rand(()) * 2)

    function = pygraph.jit(fn)
    for seed in range(5):
        x = vector()
        results: list[Tensor] = []
        for call in (function, fn):
            torch.manual_seed(seed)
            results += [call(x), torch.rand(())]
        torch.testing.assert_close(results[0], results[2])
        torch.testing.assert_close(results[1], results[3])
    check(torch.add, [(x, x)] * 3)
