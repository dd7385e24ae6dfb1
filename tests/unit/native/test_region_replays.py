"""Graphs with work of the host between them: the call is Python's, and their replays are native."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.process import extension
from tests.unit.native.test_replay import Fake, vectors
from tests.unit.native.test_replay import fake as fake  # a fixture

pytestmark = pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))


def asks(x: Tensor, k: float) -> tuple[Tensor, Tensor]:
    y = x * k
    if y.sum() > 0:
        return y + 1, y.view(-1)[1:]
    return y - 1, y * k


def updates(x: Tensor, total: Tensor) -> Tensor:
    total.add_(x)
    if x.sum() > 0:
        total.mul_(2)
    return total + x


def native_replays(fake: Fake, call: Any) -> int:
    before = len(fake.launches)
    call()
    return len(fake.launches) - before


def test_results_are_eagers_and_stay(fake: Fake) -> None:
    fast = pygraph.jit(asks)
    kept: list[tuple[Any, Any]] = []
    for turn, x in enumerate(vectors(24)):
        x = x.abs() if turn % 3 else -x.abs()
        kept.append((fast(x, 2.0 + turn), asks(x, 2.0 + turn)))
        for found, expected in kept:
            torch.testing.assert_close(found, expected)
    for sign in (1, -1):
        x = vectors(1)[0].abs() * sign
        assert native_replays(fake, lambda x=x: fast(x, 3.5)) >= 2  # or three, if it begins anew


def test_updates_are_seen_by_autograd(fake: Fake) -> None:
    fast = pygraph.jit(updates)
    totals = [torch.zeros(5, device="emu"), torch.zeros(5, device="emu")]
    for x in vectors(12):
        x, versions = x.abs(), [total._version for total in totals]
        torch.testing.assert_close(fast(x, totals[0]), updates(x, totals[1]))
        assert all(total._version > before for total, before in zip(totals, versions, strict=True))
    torch.testing.assert_close(*totals)
    assert fake.launches


def test_captured_tensors_are_updated(fake: Fake) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x)
            return self.seen + 1 if x.sum() > 0 else self.seen * 2

    pair: list[Any] = [Counting().to("emu"), Counting().to("emu")]
    fast = pygraph.jit(pair[0])
    for x in vectors(12):
        version = pair[0].seen._version
        torch.testing.assert_close(fast(x.abs()), pair[1](x.abs()))
        assert pair[0].seen._version > version
    torch.testing.assert_close(pair[0].seen, pair[1].seen)
    assert fake.launches


def test_a_backward_reads_what_a_native_replay_has_saved(fake: Fake) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5).to("emu")

    def loss(x: Tensor) -> Tensor:
        y = layer(x).tanh()
        if y.isnan().any():
            raise ValueError
        return (y * y).sum()

    fast = pygraph.jit(loss)
    held: list[tuple[Tensor, Tensor]] = []
    for x in vectors(10):
        held.append((fast(x), loss(x)))
        if len(held) == 2:  # two forwards before their backwards
            for pair in held:
                gradients = [torch.autograd.grad(one, [*layer.parameters()]) for one in pair]
                torch.testing.assert_close(*gradients)
            held.clear()
    assert fake.launches


def test_refusals_and_other_streams_are_left_to_python(fake: Fake) -> None:
    fast = pygraph.jit(asks)
    for x in vectors(8):
        torch.testing.assert_close(fast(x.abs(), 2.0), asks(x.abs(), 2.0))
    for refuse in ("launch", "commit", None):
        fake.refuse = refuse
        x = vectors(1)[0].abs()
        torch.testing.assert_close(fast(x, 2.5), asks(x, 2.5))
    for attribute, value in (("capturing", 1), ("stream", 3)):
        before = getattr(fake, attribute)
        setattr(fake, attribute, value)
        x = vectors(1)[0].abs()
        result: list[Any] = []
        assert native_replays(fake, lambda x=x, result=result: result.append(fast(x, 2.5))) == 0
        torch.testing.assert_close(result[0], asks(x, 2.5))
        setattr(fake, attribute, before)


def test_another_layout_is_left_to_python(fake: Fake) -> None:
    """Of what an operation outside of graphs gives."""

    def chosen(x: Tensor) -> Tensor:
        y = x * 2
        return y[y > 0].exp() + 1

    fast = pygraph.jit(chosen)
    for x in vectors(16):
        torch.testing.assert_close(fast(x), chosen(x))
