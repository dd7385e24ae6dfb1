"""Outcomes of calls: facts that are known once a call has run below all levels, and that the levels above need."""

from __future__ import annotations

import dataclasses

import torch

from pygraph.autograd.pullback import Pullback
from pygraph.autograd.result_spec import ResultSpec


@dataclasses.dataclass(frozen=True)
class StridedView:
    """A view of a tensor by shape, strides and offset.

    Attributes:
        shape: The view's shape.
        stride: The view's strides, in elements.
        offset: The view's offset from the tensor's first element, in elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of a tensor, with its history."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class Outcome:
    """The outcome of a call besides its results' tensors.

    Attributes:
        spec: The spec of the result.
        pullback: How the call is differentiated, if not as its function usually is.
        inputs: The results that are tensors that were passed, and which, by number.
        input_views: The results that are views of tensors that were passed, and of which, by number.
        duplicates: The results that are the same tensor as an earlier one, and which, by number.
        saved: The tensors that its backward needs and that are no results.
    """

    def __init__(self) -> None:
        self.spec: ResultSpec | None = None
        self.pullback: Pullback | None = None
        self.inputs: dict[int, int] = {}
        self.input_views: dict[int, tuple[int, StridedView]] = {}
        self.duplicates: dict[int, int] = {}
        self.saved: list[torch.Tensor] = []

    def pop_out_dims(self) -> tuple[int | None, ...]:
        """Remove and return the results' batch dimensions of the outermost ``vmap``, which no outer level needs."""
        assert self.spec is not None
        *others, out_dims = self.spec.out_dims
        self.spec = dataclasses.replace(self.spec, out_dims=tuple(others))
        return out_dims
