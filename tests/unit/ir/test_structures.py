"""Texts of differences between structures of arguments."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from pygraph.ir.structures import maker, structure_differences

Point = namedtuple("Point", "x y")
Other = namedtuple("Other", "x y")


def call(*args: Any, **kwargs: Any) -> pytree.TreeSpec:
    return pytree.tree_structure((args, kwargs))


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        (call(1), call(1, 2), "args[1] is missing"),
        (call(1, k=2), call(1), "kwargs['k'] is unexpected"),
        (call([1, 2]), call((1, 2)), "args[0] is a list, not a tuple"),
        (call({"a": [1]}), call({"a": 1}), "args[0]['a'] is a list, not a leaf"),
        (call({"a": 1, "b": 2}), call({"b": 1, "a": 2}), "args[0] has its keys in another order"),
        (call(OrderedDict(a=1)), call(OrderedDict(b=1)), "args[0]['a'] is unexpected; args[0]['b'] is missing"),
        (call(defaultdict(int, a=1)), call(defaultdict(int)), "args[0]['a'] is unexpected"),
        (call(defaultdict(int, a=1)), call(defaultdict(list, a=1)), "args[0] is of another class, or kind of it"),
        (call(Point(1, 2)), call(Other(1, 2)), "args[0] is of another class, or kind of it"),
        (call(Point(1, [2])), call(Point(1, [2, 3])), "args[0][1][1] is missing"),
        (call(*range(8)), call(), "args[0] is unexpected; args[1] is unexpected; args[2] is unexpected; "
                                  "args[3] is unexpected; and 4 more"),
        (call(1), call(2), ""),
    ],
)  # fmt: skip
def test_differences(found: pytree.TreeSpec, expected: pytree.TreeSpec, text: str) -> None:
    assert structure_differences(found, expected) == text


Pair = namedtuple("Pair", "a b")


def nested(depth: int) -> Any:
    return 0 if depth == 0 else (nested(depth - 1), [1])


@pytest.mark.parametrize(
    "value",
    [0, (), [[]], {"b": (1, {"c": 2}), 3: [4]}, Pair(1, {"x": 2}), OrderedDict(b=1, a=[2]), (torch.Size([2, 3]), 1),
     nested(300)],
)  # fmt: skip
def test_structures_are_made_again(value: Any) -> None:
    leaves, structure = pytree.tree_flatten(value)
    made = maker(structure)(leaves)
    assert type(made) is type(value)
    assert made == value
