"""Value numbering: equal numbers for the values that several traces of one function compute in the same way."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.ir.descriptors import Captured, CapturedGenerator, Input, TensorSpec
from pygraph.ir.effects import has_effect
from pygraph.ir.program import Program


class ValueNumbering:
    """A table of value numbers: equal for values that the same operations compute of the same arguments."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._constants: dict[str, torch.Tensor] = {}

    def of(self, program: Program) -> dict[fx.Node, int]:
        """Return the numbers of all values of a Program."""
        found: dict[fx.Node, int] = {}
        inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        effects = itertools.count()
        for node in program.nodes:
            if node.op == "output":
                continue
            key = self._input(inputs[node]) if node in inputs else _operation(node, found, effects)
            found[node] = self._numbers.setdefault(key, len(self._numbers))
        return found

    def _input(self, descriptor: Input) -> Hashable:
        if isinstance(descriptor, CapturedGenerator):
            return "generator", id(descriptor.value)
        if not isinstance(descriptor, Captured):
            return "argument", getattr(descriptor, "leaf", None)
        tensor = descriptor.value
        if descriptor.kind == "constant":  # made anew by every trace
            first = self._constants.setdefault(descriptor.name, tensor)
            if TensorSpec.of(first) == TensorSpec.of(tensor) and torch.equal(first, tensor):
                return "constant", descriptor.name
        return "captured", tensor.data_ptr(), TensorSpec.of(tensor)


def _operation(node: fx.Node, found: dict[fx.Node, int], effects: Iterator[int]) -> Hashable:
    if node.op != "call_function":
        return "other", id(node)
    leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
    given: list[Any] = [found[leaf] if isinstance(leaf, fx.Node) else (type(leaf), repr(leaf)) for leaf in leaves]
    turn = next(effects) if has_effect(node) else None  # no random draw is equal to another one
    return node.target, tuple(given), repr(tree), turn
