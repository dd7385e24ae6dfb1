"""Flat functions that torch.func's transforms derive from others: ``vmap``, ``vjp`` and ``jvp``.

Each runs the user's Python again, so that a custom ``autograd.Function``, ``detach()`` or ``no_grad()`` in it means
what it means in eager; nothing is derived from a trace.
"""

# Results and arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch._functorch.vmap import restore_vmap

from pygraph.autograd.flat_function import FlatFunction
from pygraph.autograd.levels import is_dual_level, plain_of
from pygraph.autograd.result_spec import ResultSpec, flatten_result


class TransformableFunction(FlatFunction):
    """A flat function with rules for batching, gradients and tangents.

    By default they derive another function, which runs this one again inside a transform of torch.func.
    """

    def batched(
        self, tensors: Sequence[torch.Tensor], in_dims: tuple[int | None, ...], size: int, randomness: str
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the batched function, and its tensors; as `torch.vmap`."""
        key = ("vmap", in_dims, size, randomness)
        return self.derive(key, lambda: Vmapped(self, in_dims, size, randomness)), list(tensors)

    def save(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that `pull_back` and `push_forward` need of a call's tensors and results."""
        return list(tensors)

    def pull_back(
        self,
        saved: Sequence[torch.Tensor],
        mask: tuple[bool, ...],
        cotangents: Sequence[torch.Tensor | None],
        numbers: Sequence[Any],
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the function that computes gradients, and its tensors.

        Args:
            saved: The tensors that `save` has returned.
            mask: Which of the function's tensors gradients are wanted for.
            cotangents: The cotangents of the results, None where there is none.
            numbers: The numbers of the call.
        """
        given = tuple(i for i, cotangent in enumerate(cotangents) if cotangent is not None)
        vjp = self.derive(("vjp", mask, given), lambda: Vjp(self, mask, given))
        return vjp, [*saved, *(cotangent for cotangent in cotangents if cotangent is not None)]

    def push_forward(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None], results: tuple[int, ...]
    ) -> tuple[TransformableFunction, list[torch.Tensor]]:
        """Return the function that computes tangents of these results, and its tensors."""
        mask = tuple(tangent is not None for tangent in tangents)
        jvp = self.derive(("jvp", mask, results), lambda: Jvp(self, mask, results))
        return jvp, [*saved, *(tangent for tangent in tangents if tangent is not None)]


class Vmapped(TransformableFunction):
    """``torch.vmap`` of a flat function."""

    def __init__(
        self, inner: TransformableFunction, in_dims: tuple[int | None, ...], size: int, randomness: str
    ) -> None:
        super().__init__(inner.function, f"vmap({inner.name})", inner.arity, inner.lifted)
        self.differentiable = inner.differentiable
        self.effects, self.repeats = inner.effects, inner.repeats
        self.input_aliases = inner.input_aliases
        self.may_save = inner.may_save
        self._inner = inner
        self._in_dims = in_dims
        self._size = size
        self._randomness = randomness

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], ResultSpec]:
        """Run the function for a whole batch."""
        specs: list[ResultSpec] = []

        def one(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found, spec = self._inner.run(tensors, numbers)
            specs.append(spec)
            return tuple(found)

        # Unlike vmap itself, it returns which results are not batched. Private; checked with torch 2.11 and 2.13.
        found, out_dims = restore_vmap(one, self._in_dims, self._size, self._randomness)(*tensors)
        return list(found), dataclasses.replace(specs[0], out_dims=(*specs[0].out_dims, tuple(out_dims)))


class Vjp(TransformableFunction):
    """``torch.func.vjp`` of a flat function, from its tensors and the cotangents of its results to gradients.

    Args:
        inner: The flat function.
        mask: Which of its tensors gradients are wanted for.
        results: Of which of its results there are cotangents.
        has_zeros: Whether gradients that depend on no cotangent are zeros; else they are None, as in ``.backward()``.
        repeated: By their numbers, tensors that were passed before, and the first of each, which has their gradients.
    """

    def __init__(
        self,
        inner: TransformableFunction,
        mask: tuple[bool, ...],
        results: tuple[int, ...],
        *,
        has_zeros: bool = False,
        repeated: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(inner.function, f"vjp({inner.name})", inner.arity + len(results), inner.lifted)
        self.repeats = inner.repeats or inner.effects is not None
        self._inner = inner
        self._mask = mask
        self._results = results
        self._has_zeros, self._repeated = has_zeros, repeated or {}

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], ResultSpec]:
        """Run the function forwards and backwards."""
        primals, cotangents = tensors[: self._inner.arity], tensors[self._inner.arity :]
        reached: set[int] = set()  # torch.func.vjp does not tell no gradient from one that is zero

        def reach(number: int, _: torch.Tensor) -> None:
            reached.add(number)

        def selected(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for number, primal in enumerate(chosen):
                primal.register_hook(functools.partial(reach, number))
            merged = _merged(primals, chosen, self._mask)
            merged = [merged[self._repeated.get(number, number)] for number in range(len(merged))]
            results, _ = self._inner.run(merged, numbers)
            return tuple(results[index] for index in self._results or self._differentiable(results))

        found, pull, *_ = torch.func.vjp(selected, *_chosen(primals, self._mask))
        # Gradients that depend on no cotangent, as a custom Function's may, are the same for zeros.
        given = tuple(cotangents) if self._results else tuple(map(torch.zeros_like, found))
        with torch.enable_grad():  # without it, some formulas take shortcuts that have no derivatives
            gradients = pull(given)
        chosen = [g if self._has_zeros or number in reached else None for number, g in enumerate(gradients)]
        return flatten_result(in_own_memory(chosen, tensors))

    def _differentiable(self, results: Sequence[torch.Tensor]) -> list[int]:
        floating = (index for index, result in enumerate(results) if result.is_floating_point() or result.is_complex())
        return [index for index in floating if self._inner.has_gradient(index)]


class Jvp(TransformableFunction):
    """``torch.func.jvp`` of a flat function, from its tensors and the tangents of some to tangents of its results.

    Args:
        inner: The flat function.
        mask: Which of its tensors have tangents.
        results: The results whose tangents are wanted.
    """

    def __init__(self, inner: TransformableFunction, mask: tuple[bool, ...], results: tuple[int, ...]) -> None:
        super().__init__(inner.function, f"jvp({inner.name})", inner.arity + sum(mask), inner.lifted)
        self.repeats = inner.repeats or inner.effects is not None
        self._inner = inner
        self._mask = mask
        self._results = results

    def run(self, tensors: Sequence[torch.Tensor], numbers: Sequence[Any]) -> tuple[list[torch.Tensor], ResultSpec]:
        """Run the function with tangents."""
        primals, tangents = tensors[: self._inner.arity], tensors[self._inner.arity :]

        def selected(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results, _ = self._inner.run(_merged(primals, chosen, self._mask), numbers)
            return tuple(results[index] for index in self._results)

        with _inside_dual_level():
            _, moved, *_ = torch.func.jvp(selected, tuple(_chosen(primals, self._mask)), tuple(tangents))
        return flatten_result(moved)


@contextlib.contextmanager
def _inside_dual_level() -> Generator[None, None, None]:
    """Have ``torch.func.jvp`` use the dual level that is active: there can be no second one.

    It does so by itself inside another ``torch.func.jvp``. Private; checked with torch 2.11 and 2.13.
    """
    nesting = eager_transforms.JVP_NESTING
    eager_transforms.JVP_NESTING = max(nesting, int(is_dual_level()))
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING = nesting


def _chosen(values: Sequence[torch.Tensor], mask: Sequence[bool]) -> list[torch.Tensor]:
    return [value for value, wanted in zip(values, mask, strict=True) if wanted]


def _merged(values: Sequence[torch.Tensor], chosen: Sequence[torch.Tensor], mask: Sequence[bool]) -> list[torch.Tensor]:
    """Return all values, with the chosen ones at the positions in the mask."""
    given = iter(chosen)
    return [next(given) if wanted else value for value, wanted in zip(values, mask, strict=True)]


def in_own_memory(
    gradients: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients that share no memory with each other or with other tensors: autograd accumulates in it."""
    taken = {plain_of(other).untyped_storage()._cdata for other in others}
    found: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is not None:
            gradient = gradient.clone() if plain_of(gradient).untyped_storage()._cdata in taken else gradient
            taken.add(plain_of(gradient).untyped_storage()._cdata)
        found.append(gradient)
    return tuple(found)
