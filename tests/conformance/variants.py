"""The ways in which an operator is called: each makes a function of flat tensors out of a sample and an operation.

The same function is made twice, of the operator itself and of the operator through `pygraph.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from conformance_cases import Case, clones, eager_call
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

from tests.conformance.samples import Sample

Operation = Callable[..., Any]
Function = Callable[..., Any]
"""Takes the tensors of a sample, or what the variant makes of them."""


def call(sample: Sample, operation: Operation) -> Function:
    """The operation itself; in-place variants too."""

    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = sample.arguments(tensors)
        return operation(*args, **kwargs)

    return run


def call_out(sample: Sample, operation: Operation, structure: pytree.TreeSpec) -> Function:
    """The operation with ``out=``; the last tensors are the results."""
    count = len(sample.sets[0])

    def run(*tensors: torch.Tensor) -> Any:
        args, kwargs = sample.arguments(tensors[:count])
        return operation(*args, **kwargs, out=pytree.tree_unflatten(list(tensors[count:]), structure))

    return run


def out_sets(sample: Sample, operation: Operation) -> tuple[tuple[list[torch.Tensor], ...], pytree.TreeSpec] | None:
    """The sample's tensors with memory for results behind them, and what ``out=`` is made of these.

    None if not all results are tensors.
    """
    result, _ = eager_call(Case(call(sample, operation), sample.sets), sample.sets[0])
    leaves, structure = pytree.tree_flatten(tuple(result) if isinstance(result, (tuple, list)) else result)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    # Filled, so that eager and we begin with the same.
    return tuple([*tensors, *(torch.ones_like(leaf) for leaf in leaves)] for tensors in sample.sets), structure


def gradient(sample: Sample, operation: Operation) -> Function:
    """Results and their gradients, taken outside of the operation: ``vjp(operation)``."""

    def run(*tensors: torch.Tensor) -> Any:
        def outputs(*wanted: torch.Tensor) -> list[torch.Tensor]:
            filled = list(tensors)
            for place, tensor in zip(sample.wanted, wanted, strict=True):
                filled[place] = tensor
            args, kwargs = sample.arguments(filled)
            leaves = pytree.tree_leaves(sample.process(operation(*args, **kwargs)))
            return [x for x in leaves if isinstance(x, torch.Tensor) and _is_differentiable(x)]

        found, pull = torch.func.vjp(outputs, *(tensors[place] for place in sample.wanted))
        # On a GPU some gradients are torch's own zeros, which have no memory to look at.
        return found, [g.new_zeros(g.shape) if g._is_zerotensor() else g for g in pull([*map(_cotangent, found)])]

    return run


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout == torch.strided


def _cotangent(result: torch.Tensor) -> torch.Tensor:
    ends, dtype = (0.5, 1.5), torch.float32
    if result.is_complex():
        ends, dtype = (0.5 + 0.25j, 1.5 + 0.75j), torch.complex64
    values = torch.linspace(*ends, result.numel(), dtype=dtype, device=result.device)
    return values.to(result.dtype).reshape(result.shape)


def batched(sample: Sample, operation: Operation) -> Function:
    """``vmap`` of the operation; random numbers differ within the batch."""
    return torch.vmap(call(sample, operation), randomness="different")


def batched_sets(sample: Sample) -> tuple[list[torch.Tensor], ...]:
    """The tensors of both sets stacked, and the other way round."""

    def stacked(*sets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.stack(tensors) for tensors in zip(*map(clones, sets), strict=True)]

    first, second = sample.sets
    return stacked(first, second), stacked(second, first)
