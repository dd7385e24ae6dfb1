"""Value numbering: equal numbers for what several traces compute in the same way, other numbers for random draws."""

from __future__ import annotations

import torch

import pygraph
from pygraph.autograd.value_numbering import ValueNumbering

X = torch.tensor([0.5, -1.0, 2.0])


def numbers_by_name(numbering: ValueNumbering, program: pygraph.program.Program) -> dict[str, int]:
    return {node.name: number for node, number in numbering.of(program).items()}


def test_equal_computations_have_equal_numbers() -> None:
    numbering = ValueNumbering()
    one = numbers_by_name(numbering, pygraph.trace(lambda x: (x.sin().exp(), x.cos()))(X))
    other = numbers_by_name(numbering, pygraph.trace(lambda x: (x.cos(), x.sin()))(X))
    assert one["sin"] == other["sin"]
    assert one["cos"] == other["cos"]
    assert one["exp"] not in other.values()


def test_draws_are_never_equal_within_a_trace() -> None:
    program = pygraph.trace(lambda x: torch.rand_like(x) + torch.rand_like(x))(X)
    numbers = ValueNumbering().of(program)
    draws = [number for node, number in numbers.items() if "rand" in str(node.target)]
    assert len(draws) == len(set(draws)) == 2


def test_arguments_are_distinguished_by_leaf() -> None:
    numbering = ValueNumbering()
    one = numbers_by_name(numbering, pygraph.trace(lambda x, y: x - y)(X, X.clone()))
    other = numbers_by_name(numbering, pygraph.trace(lambda x, y: y - x)(X, X.clone()))
    assert one["sub"] != other["sub"]
