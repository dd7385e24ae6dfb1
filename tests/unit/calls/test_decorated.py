"""Functions that a context of torch decorates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.tracing.decorated import decoration_of
from tests.steps import assert_same


@torch.inference_mode()
def doubled(x: Tensor, times: int = 2) -> tuple[Tensor, int]:
    return x.sin() * times, times


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Sampler:
    def __init__(self) -> None:
        self.count = 0

    @torch.inference_mode()
    def sample(self, x: Tensor) -> Tensor:
        self.count += 1
        return x.exp() + self.count


def inputs(device: torch.device) -> list[Tensor]:
    return [torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)).to(device) for seed in range(8)]


def test_results_are_tensors_of_inference_mode(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    for fn in (doubled, model):
        fast = pygraph.jit(fn)
        for x in inputs(device):
            found, expected = fast(x), fn(x)
            assert_same(found, expected, device)
            first = found[0] if isinstance(found, tuple) else found
            assert first.is_inference()
        info = fast.cache_info()
        assert info.captures == 1
        assert info.hits >= 6
        assert fast.explain().to_dict()["fallbacks"] == []


def test_a_method_that_counts(device: torch.device) -> None:
    mine, theirs = Sampler(), Sampler()
    fast = pygraph.jit(mine.sample)
    for x in inputs(device):
        found, expected = fast(x), theirs.sample(x)
        assert_same(found, expected, device)
        assert found.is_inference()
    assert mine.count == theirs.count == 8
    assert fast.cache_info().captures > 0


def test_static_arguments_stay_static(device: torch.device) -> None:
    fast = pygraph.jit(doubled, static_argnums=1)
    for x in inputs(device):
        assert_same(fast(x, 3), doubled(x, 3), device)
    with torch.inference_mode():
        assert fast(inputs(device)[0], 3)[0].is_inference()


@torch.no_grad()
def halved(x: Tensor) -> tuple[Tensor, int]:
    turns = 0
    while x.abs().max() > 0.1:
        x = x * 0.5
        x = x - x.mean() * 0.01
        turns += 1
    return x, turns


def test_a_loop_in_a_decorated_function_is_cut(device: torch.device) -> None:
    fast = pygraph.jit(halved)
    for number, x in enumerate(inputs(device) * 2):
        assert_same(fast(x * number), halved(x * number), device)
    assert "test_decorated.py" in str(fast.explain().to_dict()["in_python"]), str(fast.explain())


@pytest.mark.parametrize(
    ("decorator", "is_inference"),
    [(torch.no_grad(), False), (torch.inference_mode(), True), (torch.inference_mode(False), False)],
)
def test_decorations_are_found(decorator: Any, is_inference: bool) -> None:
    """What `pygraph.tracing.decorated` needs of torch."""

    def plain(x: Tensor) -> Tensor:
        return x

    found = decoration_of(decorator(plain))
    assert found is not None
    assert found.inner is plain
    assert found.is_inference is is_inference
    with found.context():
        assert torch.is_inference_mode_enabled() is is_inference
    assert decoration_of(plain) is None
