"""Preserved state: a second run finds contents and random numbers of the first, and what came after is there again."""

from __future__ import annotations

import torch

from pygraph.autograd.preserved_state import Effects


def test_a_second_run_finds_the_state_of_the_first() -> None:
    read, unread, captured = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    torch.manual_seed(0)
    before = Effects(True, {0: True, 1: False}, ((captured, True),)).preserve([read, unread])
    first = torch.rand(3)
    for tensor in (read, unread, captured):
        tensor.add_(1)
    versions = read._version, captured._version  # pyright: ignore[reportPrivateUsage]
    with before.restored():
        assert [float(tensor.sum()) for tensor in (read, unread, captured)] == [0, 2, 0]
        assert torch.equal(torch.rand(3), first)
    assert [float(tensor.sum()) for tensor in (read, unread, captured)] == [2, 2, 2]
    assert (read._version, captured._version) == versions  # pyright: ignore[reportPrivateUsage]
    after = torch.rand(3)
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(torch.rand(3), after)
