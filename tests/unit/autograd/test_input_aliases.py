"""Results that are inputs or views of these: found on one run, made again of other inputs."""

from __future__ import annotations

import dataclasses

import torch

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
