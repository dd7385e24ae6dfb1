"""Flattening of a function's results into tensors and a spec by which they are put together again."""

# Results are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.guards.objects import has_objects, with_parts
from pygraph.tracing.results import is_known_size


@dataclasses.dataclass(frozen=True)
class ResultSpec:
    """A result without its tensors.

    Attributes:
        tree: The structure; None for a tuple.
        leaves: The leaves, with a sentinel for each tensor.
        out_dims: For each ``vmap`` that the result has been through, the innermost first, the batch dimension of each
            tensor.
    """

    tree: pytree.TreeSpec | None
    leaves: tuple[Any, ...]
    out_dims: tuple[tuple[int | None, ...], ...] = ()

    @property
    def tensor_leaves(self) -> list[int]:
        """The numbers of the leaves that are tensors."""
        return [index for index, leaf in enumerate(self.leaves) if leaf is _TENSOR]

    def unflatten(self, tensors: Iterable[Any]) -> Any:
        """Return the result with these tensors."""
        if self is _ONE_TENSOR:
            (tensor,) = tensors
            return tensor
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return tuple(leaves) if self.tree is None else pytree.tree_unflatten(leaves, self.tree)

    @classmethod
    def of_tuple(cls, row: Sequence[Any]) -> ResultSpec:
        """Return the spec of a tuple of tensors and None."""
        return cls(None, tuple(None if leaf is None else _TENSOR for leaf in row))


_TENSOR = object()
_ONE_TENSOR = ResultSpec(pytree.tree_structure(0), (_TENSOR,))


def leaves_of_result(result: Any) -> list[Any]:
    """Return a result's leaves, those of objects of other classes too."""
    return _flatten(result)[0]


def flatten_result(result: Any) -> tuple[list[torch.Tensor], ResultSpec]:
    """Return a result's tensors, and its spec."""
    if isinstance(result, torch.Tensor):
        return [result], _ONE_TENSOR
    leaves, tree = _flatten(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, ResultSpec(tree, tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))


def _flatten(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    leaves, tree = pytree.tree_flatten(result, is_leaf=is_known_size)
    if has_objects(leaves):
        leaves, tree = pytree.tree_flatten(with_parts(result, is_known_size), is_leaf=is_known_size)
    return leaves, tree
