"""Bytes of results that nothing writes to: which they are, and that all others are still compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import pygraph
from pygraph.errors import CaptureError
from pygraph.runtime import gaps
from pygraph.runtime.devices import driver_for
from pygraph.runtime.gaps import close, gaps_of
from pygraph.runtime.replay_proof import ReplayProof

LENGTH, WRITTEN = 40, [*range(8), *range(20, 36)]


@torch.library.custom_op("pygraph_tests_gaps::keep", mutates_args=())
def keep(x: Tensor) -> tuple[Tensor, Tensor]:
    """A result, and bytes of which some are what was there before."""
    reserve = x.new_empty(LENGTH, dtype=torch.uint8)
    part = x[:4].to(torch.uint8)
    reserve[:8].view(2, 4).copy_(part.expand(2, 4))
    reserve[20:36].view(4, 4).copy_((part + 1).expand(4, 4))
    return x * 2, reserve


@keep.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(LENGTH, dtype=torch.uint8)


def _is_kept(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and "pygraph_tests_gaps" in str(source.target) and node.args[1] == 1


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The regions whose gaps were asked for."""
    monkeypatch.setattr(gaps, "is_reserve", _is_kept)
    found: list[Any] = []
    original = ReplayProof.passes

    def passes(self: ReplayProof, copy_outside: bool = False) -> bool:
        found.append((self.region.body, self.example))
        return original(self, copy_outside)

    monkeypatch.setattr(ReplayProof, "passes", passes)
    return found


def call(x: Tensor) -> tuple[Tensor, Tensor]:
    doubled, reserve = keep(torch.sin(x) * 50)
    return doubled + 1, reserve


def test_what_is_written_is_all_that_is_compared(device: torch.device, bodies: list[Any]) -> None:
    fast = pygraph.jit(call)
    for _ in range(4):
        x = torch.rand(6).to(device)
        (doubled, reserve), expected = fast(x), call(x)
        torch.testing.assert_close(doubled, expected[0])
        assert torch.equal(reserve[WRITTEN], expected[1][WRITTEN])
    assert fast.cache_info().captures == 1, str(fast.explain())
    assert not fast.explain().to_dict()["fallbacks"]
    (body, example), *_ = bodies
    (unwritten,) = example.gaps.values()
    assert (~unwritten).nonzero().flatten().tolist() == WRITTEN
    assert [one.tolist() for one in gaps_of(body, driver_for(device)).values()] == [unwritten.tolist()]
    outputs: list[Tensor] = [torch.ones(6), torch.full((LENGTH,), 7, dtype=torch.uint8, device=device)]
    close(dict.fromkeys([1], unwritten), outputs)
    assert (outputs[1] == 7).nonzero().flatten().tolist() == WRITTEN


@contextlib.contextmanager
def _changed(position: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replays during proofs write another value to one byte of the reserve."""
    original = ReplayProof._written_outputs

    def outputs(self: ReplayProof, fresh: Any) -> list[Tensor]:
        for index, (number, _) in enumerate(self.region.views):
            if index in self.example.gaps:
                fresh[number].view(-1)[position] += 3
        return original(self, fresh)

    with monkeypatch.context() as patch:
        patch.setattr(ReplayProof, "_written_outputs", outputs)
        yield


@pytest.mark.parametrize("position", [0, 7, 8, 19, 20, 35, 36])
def test_one_wrong_byte(
    device: torch.device, bodies: list[Any], position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(6).to(device)
    fast = pygraph.jit(call)
    with _changed(position, monkeypatch):
        doubled, _ = fast(x)
    torch.testing.assert_close(doubled, call(x)[0])
    notes = [note["reason"] for note in fast.explain().to_dict()["fallbacks"]]
    assert any("ordinary launches" in reason for reason in notes) == (position in WRITTEN), notes


def test_a_device_that_does_not_record_it(
    device: torch.device, bodies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no gaps then, and the region itself says why it is none."""

    def refuse(attempt: Any) -> Any:
        raise CaptureError("not this one")

    x = torch.rand(6).to(device)
    pygraph.jit(call)(x)
    body, _ = bodies[0]
    monkeypatch.setattr(gaps, "patiently", refuse)
    assert gaps_of(body, driver_for(device)) == {}
