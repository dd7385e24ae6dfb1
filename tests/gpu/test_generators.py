"""Random generators passed to operations on a GPU; `tests/unit/test_random_generators.py` runs there too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def generator_of(seed: int = 5) -> torch.Generator:
    return torch.Generator(device=CUDA).manual_seed(seed)


def noise(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    return lambda x: x + torch.rand(4, device=x.device, generator=generator)


def in_graphs(fast: Any) -> bool:
    report = fast.explain().to_dict()
    return not report["fallbacks"] and bool(fast.cache_info().captures)


def test_the_default_generator_passed_explicitly() -> None:
    """It is the one that operations draw from in any case, in the order of the code."""
    default = torch.cuda.default_generators[0]

    def draw(x: Tensor) -> list[Tensor]:
        return [x + torch.rand(4, device=x.device, generator=one) for one in (default, None, default)]

    fast, x = pygraph.jit(draw), torch.ones(4, device=CUDA)
    for seed in range(4):
        torch.cuda.manual_seed(seed)
        expected = draw(x)
        after = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        for mine, other in zip(fast(x), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
        assert torch.equal(torch.cuda.get_rng_state(), after)
    assert in_graphs(fast)


def test_generators_that_share_a_state_are_refused() -> None:
    one, plain = generator_of(), generator_of()
    other, plain_other = one.graphsafe_get_state(), plain.graphsafe_get_state()

    def make(first: torch.Generator, second: torch.Generator) -> Callable[[Tensor], list[Tensor]]:
        return lambda x: [x + torch.rand(4, device=x.device, generator=g) for g in (first, second, first)]

    fast, x = pygraph.jit(make(one, other)), torch.ones(4, device=CUDA)
    for _ in range(3):
        for mine, eager in zip(fast(x), make(plain, plain_other)(x), strict=True):
            torch.testing.assert_close(mine, eager, rtol=0, atol=0)
    reasons = [note["reason"] for note in fast.explain().to_dict()["fallbacks"]]
    assert any("share a state" in reason for reason in reasons), reasons


def test_another_state_behind_a_generator() -> None:
    """A replay reads the state that the generator has then, also where torch has given it another one as a whole."""
    mine, plain = generator_of(), generator_of()
    fast, x = pygraph.jit(noise(mine)), torch.ones(4, device=CUDA)
    for seed in (None, None, 8, None):
        if seed is not None:
            mine.graphsafe_set_state(generator_of(seed))
            plain.graphsafe_set_state(generator_of(seed))
        torch.testing.assert_close(fast(x), noise(plain)(x), rtol=0, atol=0)
        assert mine.get_offset() == plain.get_offset()
    assert in_graphs(fast)


def test_a_capture_that_fails_spoils_no_generator() -> None:
    """The operation that cannot be captured runs between graphs; the generator draws on in both."""
    mine, plain = generator_of(), generator_of()

    def make(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        def draw(x: Tensor) -> Tensor:
            spread = torch.rand(4, device=x.device, generator=generator)
            return torch.normal(x, spread, generator=generator)  # torch asks the host whether `spread` is negative

        return draw

    fast, x = pygraph.jit(make(mine)), torch.ones(4, device=CUDA)
    for _ in range(4):
        torch.testing.assert_close(fast(x), make(plain)(x), rtol=0, atol=0)
        torch.testing.assert_close(
            torch.rand(3, device=CUDA, generator=mine), torch.rand(3, device=CUDA, generator=plain), rtol=0, atol=0
        )


def test_replays_on_several_streams() -> None:
    mine, plain = generator_of(), generator_of()
    fast, x = pygraph.jit(noise(mine)), torch.ones(4, device=CUDA)
    expected = [noise(plain)(x) for _ in range(12)]
    found = [fast(x) for _ in range(2)]
    for stream in [torch.cuda.Stream() for _ in range(2)] * 5:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(fast(x))
        torch.cuda.current_stream().wait_stream(stream)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_memory_is_given_back() -> None:
    x = torch.ones(4, device=CUDA)

    def use() -> None:
        fast = pygraph.jit(noise(generator_of()))
        for _ in range(3):
            fast(x)

    use()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        use()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
