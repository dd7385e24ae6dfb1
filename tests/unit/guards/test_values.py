"""Which values are compared by value, and when two of them are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pygraph.guards.values import has_value, is_plain, is_value, same


class _Derived(int):
    """An int that may have attributes."""


VALUES: list[Any] = [
    1, 1.5, 2j, True, "a", b"a", None, torch.float32, torch.device("cpu"), torch.Size([2]), (1, (2.0, "b")),
    slice(1, None, 2), range(3), np.float32(1.5),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_an_immutable_value_is_the_same_as_itself_and_as_no_other(value: Any) -> None:
    assert has_value(value)
    assert is_value(value)
    assert same(value, value)
    assert [other for other in VALUES if same(other, value)] == [value]


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ((1, 0.0), (1, -0.0)),
        ((1,), (1, 1)),
        (np.float32(1), np.float64(1)),
        (0j, -0j),
    ],
    ids=repr,
)
def test_equal_values_of_another_type_or_sign_are_not_the_same(value: Any, other: Any) -> None:
    assert not same(value, other)


def test_nan_is_the_same_as_nan() -> None:
    assert same(float("nan"), float("nan"))
    assert same(np.float32("nan"), np.float32("nan"))


def test_mutable_objects_and_objects_of_derived_classes_are_compared_by_identity() -> None:
    for value, equal in (([1], [1]), ({1: 2}, {1: 2}), (_Derived(1), _Derived(1))):
        assert not is_plain(value)
        assert not has_value(value)
        assert not same(value, equal)
    items = [1]
    assert same((items, 1), (items, 1))
    assert not same((items, 1), ([1], 1))
    assert has_value((items, 1))
    assert not is_value((items, 1))
