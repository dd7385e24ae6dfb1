"""Results that are inputs or views of these: found on one run, made again of other inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.autograd.input_aliases import find_input_aliases, without_bases


def test_inputs_and_views_are_found_and_made_again() -> None:
    x, y, closed_over = torch.zeros(2, 3), torch.zeros(2), torch.zeros(1)
    aliases = find_input_aliases([x.t()[1], y, x + 1, closed_over], [x, 3, y, torch.zeros(1)], {id(closed_over): 3})
    assert {index: alias.operand for index, alias in aliases.items()} == {0: 0, 1: 2, 3: 3}
    other = torch.arange(6.0).view(2, 3).clone()
    again = aliases[0].of(other)
    assert again._base is other  # pyright: ignore[reportPrivateUsage]
    torch.testing.assert_close(again, other.t()[1])
    assert aliases[1].of(y) is y


def test_a_detached_view_stays_detached() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    (alias,) = find_input_aliases([x.t()], [x], {}).values()
    assert alias.of(x).requires_grad
    detached = dataclasses.replace(alias, is_detached=True).of(x)
    assert not detached.requires_grad
    assert detached.data_ptr() == x.data_ptr()


def test_views_of_unshared_memory_are_no_views_any_more() -> None:
    x = torch.zeros(2, 3)
    alone, of_input = torch.ones(2, 3).t(), x.t()
    results = without_bases([alone, of_input], [x])
    assert [result._is_view() for result in results] == [False, True]  # pyright: ignore[reportPrivateUsage]
    assert results[0].data_ptr() == alone.data_ptr()


@pytest.mark.parametrize("update", [lambda buffer: buffer, lambda buffer: buffer.add_(1), lambda buffer: buffer.t_()])
@pytest.mark.parametrize("place", ["buffer", "dict", "closure"])
def test_what_was_there_before_is_returned_as_it_is_next_to_what_has_a_gradient(
    device: torch.device, place: str, update: Callable[[Tensor], Tensor]
) -> None:
    net = nn.Linear(3, 2).to(device)
    kept = torch.zeros(2, 3, device=device)
    held: dict[str, Any] = {"kept": kept} if place == "dict" else {}
    if place == "buffer":
        net.register_buffer("kept", kept)

    def get() -> Tensor:
        return held["kept"] if place == "dict" else net.kept if place == "buffer" else kept  # type: ignore[return-value]

    fast = pygraph.jit(lambda x: (net(x), update(get())))
    expected = torch.zeros(2, 3, device=device)
    for number in range(6):
        y, found = fast(torch.ones(4, 3, device=device) * number)
        y.sum().backward()
        assert found is kept
        assert torch.equal(kept, update(expected))
    assert net.bias.grad is not None
    assert net.bias.grad.tolist() == [24.0, 24.0]
