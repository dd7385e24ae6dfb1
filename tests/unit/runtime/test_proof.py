"""What counts as the results of ordinary launches, also where these do not repeat."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import pygraph
from pygraph.runtime.comparison import Spread, agree
from pygraph.runtime.emulated import driver as emulated
from pygraph.runtime.emulated.kernels import REPLACEMENTS

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def shaky(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The emulated device with a ``sign`` of which some elements, others at every launch, have the wrong one."""
    device = emulated.driver().device
    generator = random.Random(0)

    def sign(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        out.copy_(torch.sign(x))
        for _ in range(20):
            out.view(-1)[generator.randrange(out.numel())].neg_()
        return out

    monkeypatch.setitem(REPLACEMENTS, "aten::sign.out", sign)
    return device


def test_what_does_not_repeat_is_a_graph(shaky: torch.device) -> None:
    """As a first step of Adam on gradients that are zero but for rounding."""

    def step(w: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> Any:
        w.sub_(0.01 * torch.sign(g))
        return w.abs().mean(), torch.sign(g) > 0, x * 2

    fast = pygraph.jit(step)
    for _ in range(4):
        w, g, x = (torch.randn(4000, device="cpu").to(shaky) for _ in range(3))
        before = w.clone()
        mean, positive, doubled = fast(w, g, x)
        assert ((w - (before - 0.01 * g.sgn())).abs() > 1e-6).sum() <= 20
        torch.testing.assert_close(mean, w.abs().mean())
        assert ((g > 0) != positive).sum() <= 20
        assert torch.equal(doubled, x * 2)
    report = fast.explain().to_dict()
    assert report["fallbacks"] == []
    assert report["bytes_copied_per_replay"] == 0


def test_a_pointer_that_does_not_change_shows_beside_what_does_not_repeat(
    shaky: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a kernel that holds another copy of it somewhere."""
    commit = emulated.EmulatedGraph.commit

    def commit_all_but_exp(self: Any, node: int) -> None:
        if self.nodes[node].name != "aten::exp.out":
            commit(self, node)

    monkeypatch.setattr(emulated.EmulatedGraph, "commit", commit_all_but_exp)
    monkeypatch.setenv("PYGRAPH_NATIVE", "0")  # which sends nodes without that method
    fast = pygraph.graphify(pygraph.indirect(pygraph.devicify(lambda g, x: (torch.sign(g), x.exp()))))
    for n in range(4):
        g, x = torch.randn(4000, device="cpu").to(shaky), torch.full((7,), 1.0 + n, device=shaky)
        assert torch.equal(fast(g, x)[1], x.exp())
    fallbacks = fast.explain().to_dict()["fallbacks"]
    assert [fallback["what"] for fallback in fallbacks] == ["input load_default_1 is copied", "a result is copied"]
    assert all("poisoned" in fallback["reason"] for fallback in fallbacks)


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def with_first(count: int, value: float) -> torch.Tensor:
    found = torch.ones(5000)
    found[:count] = value
    return found


@pytest.mark.parametrize(
    ("apart", "largest", "got", "expected", "covered"),
    [
        (0.1, 0.1, f32(1.0, 2.3), f32(1.0, 2.0), True),
        (0.1, 0.1, f32(1.0, 3.0), f32(1.0, 2.0), False),  # further than any
        (0.0, 0.1, f32(1.0, 2.1), f32(1.0, 2.0), False),  # this one repeats
        (0.0, 0.1, with_first(5, 1.5), with_first(5, 1.0), True),  # but for a few elements of many
        (0.0, 0.1, with_first(6, 1.5), with_first(6, 1.0), False),
        (0.0, 0.1, with_first(1, 2.0), with_first(1, 1.0), False),
        (0.0, 0.1, with_first(1, NAN), with_first(1, 1.0), False),
        (0.1, 0.1, f32(1.0, NAN), f32(1.0, 2.0), False),
        (0.1, 0.1, f32(1.0, NAN, INF), f32(1.1, NAN, INF), True),
        (0.1, 0.1, f32(1.0, -INF), f32(1.1, INF), False),
        (0.1, 0.1, torch.tensor([1, 2]), torch.tensor([1, 3]), True),
        (0.0, 0.1, torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (0.0, 0.1, torch.arange(5000), torch.arange(5000) + 1, False),
        (0.1, 0.1, f32(1.0), f32(1.1).double(), False),
    ],
)
def test_covering(apart: float, largest: float, got: torch.Tensor, expected: torch.Tensor, covered: bool) -> None:
    # Another result that does not repeat.
    spread = Spread((apart, 0.1), largest)
    assert not agree(got, expected)
    assert spread.covers([got, f32(0.0)], [expected, f32(0.0)]) is covered


def test_nothing_is_covered_where_launches_repeat() -> None:
    assert not Spread((0.1,), None).covers([with_first(1, 1.5)], [with_first(1, 1.0)])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bits(dtype: torch.dtype) -> None:
    one, other = torch.ones(4).to(dtype), torch.tensor([1.0, 1.0, 1.0, 2.0]).to(dtype)
    assert agree(one, one.clone())
    assert not agree(one, other)
    assert Spread((0.5,), 0.0).covers([one], [other])
    assert not Spread((0.0,), 0.0).covers([one], [other])


@torch.library.custom_op("pygraph_tests::drawn_by_the_host", mutates_args=())
def drawn_by_the_host(x: torch.Tensor) -> torch.Tensor:
    return x + random.random()


@drawn_by_the_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_the_host_draws_is_not_recorded(device: torch.device) -> None:
    """Launches do not repeat, and replays would: they would all have the number of the recording."""
    fast = pygraph.jit(lambda x: drawn_by_the_host(x) * 2)
    x = torch.zeros(3, device=device)
    assert len({float(fast(x)[0]) for _ in range(8)}) == 8
    assert fast.explain().to_dict()["fallbacks"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float16, torch.float32, torch.complex32, torch.complex64])
def test_results_that_repeat_agree_in_every_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Torch has no ``equal`` for complex32, and no arithmetic for 8 bits."""
    first, other = (torch.full((3,), value, dtype=torch.float32).to(dtype).to(device) for value in (1.5, 2.5))
    assert agree(first, first.clone())
    assert not agree(first, other)
    if dtype.is_complex:
        turned = torch.full((3,), 1.5 + 1j, dtype=torch.complex64).to(dtype).to(device)
        assert agree(turned.conj(), turned.conj().clone())
        assert not agree(turned.conj(), turned)
