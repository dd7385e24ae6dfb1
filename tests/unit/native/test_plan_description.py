"""Descriptions of plans: which calls have one, and how results are described."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from pygraph.calls.plan_description import _returned, is_describable


class Plain:
    """Objects that are equal to themselves only."""


class Comparable:
    """Objects that may become equal to others."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comparable)

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("leaf", [torch.zeros(1), 1, 2.5, "a", None, Plain()])
def test_leaves_that_can_be_described(leaf: Any) -> None:
    assert is_describable([leaf], frozenset())


def test_a_leaf_with_an_equality_of_its_own_cannot_be_described_unless_it_is_a_number_read_at_every_call() -> None:
    assert not is_describable([torch.zeros(1), Comparable()], frozenset())
    assert is_describable([torch.zeros(1), Comparable()], frozenset({1}))


@pytest.mark.parametrize("result", [5, (1, [2, {"a": 3}]), {"b": (), "a": [1]}])
def test_tuples_lists_and_dicts_are_described_by_an_example(result: Any) -> None:
    leaves, tree = pytree.tree_flatten(result)
    example = _returned(tree)["example"]
    assert pytree.tree_structure(example) == tree
    assert pytree.tree_leaves(example) == list(range(len(leaves)))


def test_other_containers_are_described_by_a_function() -> None:
    result = torch.return_types.sort((torch.zeros(1), torch.zeros(1)))
    leaves, tree = pytree.tree_flatten(result)
    returned = _returned(tree)
    assert "example" not in returned
    assert type(returned["unflatten"](leaves)) is type(result)
