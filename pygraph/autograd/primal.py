"""The user's function as a flat function."""

# Results and arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.autograd.derived import TransformableFunction
from pygraph.autograd.flat_function import Lookup
from pygraph.autograd.input_aliases import InputAlias
from pygraph.autograd.levels import Level, levels
from pygraph.autograd.result_spec import ResultSpec, flatten_result
from pygraph.autograd.settings import Settings
from pygraph.autograd.substitution import substituted
from pygraph.calls.engine import Engine
from pygraph.ir.structures import unflatten


class Primal(TransformableFunction):
    """The user's function, of the tensors and live numbers of a call and of the tensors that it closes over.

    Args:
        function: The engine of the function.
        tree: The structure of ``(args, kwargs)``.
        leaves: The leaves of ``(args, kwargs)``; the ones at ``tensors`` and ``numbers`` are arguments.
        tensors: Positions of tensors among the leaves.
        numbers: Positions of live numbers among the leaves.
        lifted: For each closed-over tensor that is an argument too, one or more lookups.
        settings: The settings under which it was called.

    Attributes:
        lookups: ``lifted``, for each closed-over tensor.
        aliases: The results that are inputs or views of these.
    """

    may_save = True

    def __init__(
        self,
        function: Engine,
        tree: pytree.TreeSpec,
        leaves: Sequence[Any],
        tensors: Sequence[int],
        numbers: Sequence[int],
        lifted: Sequence[tuple[Lookup, ...]],
        settings: Settings,
    ) -> None:
        first = {len(tensors) + index: lookups[0] for index, lookups in enumerate(lifted)}
        super().__init__(function, function.name, len(tensors) + len(lifted), first)
        self.lookups = tuple(lifted)
        passed = {*tensors, *numbers}
        self.leaves = [None if index in passed else leaf for index, leaf in enumerate(leaves)]
        self.tree = tree
        self.tensors = tuple(tensors)
        self.numbers = tuple(numbers)
        self.settings = settings
        self.aliases: dict[int, InputAlias] = {}

    @property
    def input_aliases(self) -> frozenset[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The numbers of the results in `aliases`."""
        return frozenset(self.aliases)

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], ResultSpec]:
        """Run the user's function, on these tensors instead of the ones that it closes over."""
        rows = zip(tensors[len(self.tensors) :], self.lookups, strict=True)
        given = {id(lookup()): tensor for tensor, lookups in rows for lookup in lookups}
        if self.effects is not None and set(levels()) & {Level.GRAD, Level.JVP}:
            # A second run, for a derivative: torch.func demands that it updates copies.
            copies = {index: tensors[index].clone() for index in self.effects.arguments}
            tensors = [copies.get(index, tensor) for index, tensor in enumerate(tensors)]
            given |= {id(tensor): tensor.clone() for tensor, _ in self.effects.captured}
        leaves = list(self.leaves)
        for index, value in zip((*self.tensors, *self.numbers), (*tensors[: len(self.tensors)], *numbers), strict=True):
            leaves[index] = value
        args, kwargs = unflatten(leaves, self.tree)
        with self.settings.restored(), substituted(given):
            result = self.function.fn(*args, **kwargs)
        found, spec = flatten_result(result)
        return [given.get(id(tensor), tensor) for tensor in found], spec
