"""Joint functions: a function traced together with its gradients, for cotangents that are given later."""

# Results are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pygraph.autograd.derived import TransformableFunction, in_own_memory
from pygraph.autograd.flat_function import UnliftedFunction
from pygraph.autograd.result_dependencies import Dependency, find_dependencies, stopping_at
from pygraph.ir.autocasting import without_autocast
from pygraph.ir.ops import cotangent
from pygraph.ir.program import Program
from pygraph.tracing.function_kinds import Rebinding
from pygraph.tracing.gradient_hooks import differentiating


class JointFunction(Rebinding):
    """A function of a forward's arguments whose result is ``(result, gradients)``; it is traced, and never called.

    Args:
        forward: The forward, without the lifted tensors that are no arguments.
        inner: The function that is differentiated.
        mask: Which of its tensors gradients are wanted for.
        differentiable_again: Whether to use formulas that can be differentiated.
        given: The results that there are cotangents of; None if of all that have a gradient.
        dependency: What the one result of ``given`` depends on, if the gradients are those of that instead, with no
            other result between.

    Attributes:
        differentiated: The results that have a gradient, once it has run.
        dependencies: What each of several is computed from, unless it is for some results only.
        tensor_leaves: Which leaves of the function's result are tensors.
        out_dims: The batch dimensions of its results.
    """

    def __init__(
        self,
        forward: UnliftedFunction,
        inner: TransformableFunction,
        mask: tuple[bool, ...],
        *,
        differentiable_again: bool,
        given: frozenset[int] | None = None,
        dependency: Dependency | None = None,
    ) -> None:
        self.forward = forward
        self.inner = inner
        self.mask = mask
        self._differentiable_again = differentiable_again
        self._given = given
        self._dependency = dependency
        self.differentiated: tuple[int, ...] = ()
        self.dependencies: dict[int, Dependency] = {}
        self.tensor_leaves: list[int] = []
        self.out_dims: tuple[tuple[int | None, ...], ...] = ()
        self.__name__ = inner.name
        self.__wrapped__ = forward.__wrapped__

    def with_cotangents_of(self, given: frozenset[int], dependency: Dependency | None = None) -> JointFunction:
        """Return the joint function for cotangents of these results only, or of one up to what it depends on."""
        again = self._differentiable_again
        return JointFunction(
            self.forward, self.inner, self.mask, differentiable_again=again, given=given, dependency=dependency
        )

    def of_result(self, index: int) -> JointFunction:
        """Return the joint function of one result that is computed from others, up to these."""
        return self.with_cotangents_of(frozenset({index}), self.dependencies[index])

    def rebound(self) -> list[torch.Tensor]:
        """Return the closed-over tensors for which others are passed."""
        return self.forward.rebound()

    def check(self, program: Program) -> None:
        """Refuse closed-over tensors that are read for which others were passed."""
        self.forward.check(program)

    def __call__(self, *leaves: Any) -> Any:
        """Compute results and gradients."""
        filled = self.forward.fill(leaves)
        tensors, numbers = filled[: self.inner.arity], filled[self.inner.arity :]
        wanted = [tensor for tensor, chosen in zip(tensors, self.mask, strict=True) if chosen]
        _set_requires_grad(wanted, True)
        with torch.enable_grad():
            results, spec = self.inner.run(tensors, numbers)
            self.tensor_leaves, self.out_dims = spec.tensor_leaves, spec.out_dims
            gradients = self._gradients(results, tensors, wanted)
        _set_requires_grad(wanted, False)
        arguments = {id(tensor) for tensor in tensors}
        detached = {id(result): result if id(result) in arguments else result.detach() for result in results}
        results = [detached[id(result)] for result in results]
        return spec.unflatten(results), in_own_memory([*map(_resolved, gradients)], [*tensors, *results])

    def _gradients(
        self, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        arguments = {id(tensor) for tensor in tensors}
        given = range(len(results)) if self._given is None else sorted(self._given)
        own = [index for index in given if index not in self.inner.input_aliases]
        differentiated = [
            index for index in own if results[index].requires_grad and id(results[index]) not in arguments
        ]
        self.differentiated = tuple(differentiated)
        if not differentiated:
            return [None] * len(wanted)
        chosen = {index: results[index] for index in differentiated}
        if self._dependency is not None:
            ends = [results[index] for index in self._dependency.results]
            with stopping_at(ends):
                return self._gradients_of(chosen, [*ends, *(tensors[index] for index in self._dependency.tensors)])
        if self._given is None and not self._differentiable_again:  # torch.func takes no gradients of results
            self.dependencies = self._find_dependencies(chosen, tensors)
        distinct = {id(tensor): tensor for tensor in wanted}
        found = self._gradients_of(chosen, [*distinct.values()])
        # Of a tensor that was passed twice, autograd adds up what both arguments get.
        gradients: dict[int, torch.Tensor | None] = dict(zip(distinct, found, strict=True))
        return [gradients.pop(id(tensor), None) for tensor in wanted]

    def _gradients_of(
        self, results: Mapping[int, torch.Tensor], of: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        chosen = list(results.values())
        cotangents = [cotangent(result.detach(), number) for number, result in enumerate(chosen)]
        again = self._differentiable_again
        # A backward runs outside of its forward's autocast. Autograd's own thread may be waiting for this one.
        with without_autocast(), torch.autograd.set_multithreading_enabled(False), differentiating():
            return list(torch.autograd.grad(chosen, of, cotangents, create_graph=again, allow_unused=True))

    def _find_dependencies(
        self, results: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> dict[int, Dependency]:
        """Find the results that are computed from others, where none shares memory with what was passed."""
        passed = {tensor.untyped_storage()._cdata for tensor in tensors}
        own = {n: result for n, result in results.items() if result.untyped_storage()._cdata not in passed}
        wanted = {index: tensor for index, tensor in enumerate(tensors) if self.mask[index]}
        return find_dependencies(own, wanted)


def _set_requires_grad(tensors: Sequence[torch.Tensor], value: bool) -> None:
    """Set ``requires_grad`` below the tracer's modes, which refuse it to the user's code."""
    with torch._C.DisableTorchFunction():  # checked with torch 2.11 and 2.13
        for tensor in tensors:
            tensor.requires_grad_(value)


def _resolved(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient without history or lazy conjugation."""
    return None if gradient is None else gradient.resolve_conj().resolve_neg().detach()
