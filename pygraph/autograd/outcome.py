"""What a call finds out at the bottom, where it runs, for those above it."""

from __future__ import annotations

import dataclasses

import torch

from pygraph.autograd.flat import Rest
from pygraph.autograd.joint import Pullback


@dataclasses.dataclass(frozen=True)
class View:
    """What part of a tensor another one is."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor, with its history."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class Outcome:
    """What a call returns besides its tensors, known once it has arrived at the bottom.

    Attributes:
        rest: The rest of the result.
        pullback: How the call is differentiated, if not as its function usually is.
        same: Results that are tensors which were passed, by number.
        views: Results that are parts of tensors which were passed.
        twins: Results that are the same tensor as an earlier one.
        saved: What its backward needs, where that is not among the results.
    """

    def __init__(self) -> None:
        self.rest: Rest | None = None
        self.pullback: Pullback | None = None
        self.same: dict[int, int] = {}
        self.views: dict[int, tuple[int, View]] = {}
        self.twins: dict[int, int] = {}
        self.saved: list[torch.Tensor] = []

    def take_dims(self) -> tuple[int | None, ...]:
        """Where the batch of the outermost ``vmap`` is in the results, which no outer level needs to know."""
        assert self.rest is not None
        *others, dims = self.rest.dims
        self.rest = dataclasses.replace(self.rest, dims=tuple(others))
        return dims
