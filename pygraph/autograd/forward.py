"""Forwards: flat functions that also return the tensors that their gradients need.

A call runs so that is differentiated once. Where more derivatives are taken, they run the user's function again, as
`pygraph.autograd.derived.Vjp` does.
"""

# Results are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph.autograd.derived import TransformableFunction
from pygraph.autograd.flat_function import UnliftedFunction
from pygraph.autograd.joint_function import JointFunction
from pygraph.autograd.pullback import Pullback
from pygraph.autograd.result_spec import ResultSpec
from pygraph.errors import PygraphError
from pygraph.tracing.function_kinds import SelfTracing, Traced
from pygraph.tracing.trace import trace_call


class NotCompiledError(PygraphError):
    """A forward has no graph, for a reason that its engine notes; the whole call runs as it is then."""


class Forward(TransformableFunction):
    """A function that returns its results, the tensors that its gradient needs, and its `Pullback`.

    Args:
        inner: The function that is differentiated.
        mask: Which of its tensors gradients are wanted for.
        differentiable_again: Whether to use formulas that can be differentiated, as torch.func does.
    """

    def __init__(self, inner: TransformableFunction, mask: tuple[bool, ...], differentiable_again: bool) -> None:
        super().__init__(inner.function, f"forward({inner.name})", inner.arity, inner.lifted)
        self.inner = inner
        self.mask = mask
        self.differentiable_again = differentiable_again

    def unlift(self, unlifted: frozenset[int]) -> Any:
        """Return the forward of all tensors but these, which the user's function finds where it closes over them."""
        return _UnliftedForward(self, unlifted)

    def unpack(self, result: Any) -> tuple[list[torch.Tensor], ResultSpec, Any]:
        """Return the function's results and saved tensors, and the `Pullback`."""
        returned, saved, pullback = result
        tensors, spec, _ = super().unpack((returned, pullback.out_dims))
        return [*tensors, *saved], spec, pullback

    def batched(
        self, tensors: Sequence[torch.Tensor], in_dims: tuple[int | None, ...], size: int, randomness: str
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Never called: forwards are made below all batches."""
        raise NotImplementedError


class _UnliftedForward(UnliftedFunction, SelfTracing):
    flat: Forward

    def __call__(self, *leaves: Any) -> Any:
        raise NotCompiledError(self.__name__)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], static: frozenset[int], name: str) -> Traced:
        flat = self.flat
        joint = JointFunction(self, flat.inner, flat.mask, differentiable_again=flat.differentiable_again)
        traced = trace_call(joint, args, kwargs, static=static, name=flat.inner.name)
        pullback = Pullback(joint, traced, args)
        return Traced(pullback.partition.forward, traced.static_leaves, traced.environment)
