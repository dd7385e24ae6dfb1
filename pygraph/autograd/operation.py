"""Applications of flat functions as one operation to all levels that differentiate or batch their tensors.

`apply` goes down level by level: a derivative gets an ``autograd.Function`` around the application, ``vmap`` replaces
the function by its batched one, and the last derivative by its `Forward`. Plain tensors arrive below all levels; there
the function that was derived on the way runs by its own engine. A backward goes the same way, with the function that
computes it.
"""

# Tensors of torch.func and its stack of transforms have no public names; results are of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._C._functorch import unwrap_if_dead  # checked with torch 2.11 and 2.13

from pygraph.autograd.derived import TransformableFunction
from pygraph.autograd.forward import Forward
from pygraph.autograd.input_aliases import without_bases
from pygraph.autograd.interpreters import Batching, Differentiating, LevelFunction, current_transform
from pygraph.autograd.levels import GradientBatch, Level, ambient, is_dual_level, levels, requires_grad
from pygraph.autograd.outcome import Outcome, StridedView
from pygraph.autograd.placeholders import placeholder
from pygraph.autograd.preserved_state import PreservedState
from pygraph.autograd.pullback import Pullback
from pygraph.autograd.result_links import with_links, without_links
from pygraph.autograd.saved_tensors import SavedTensors


@dataclasses.dataclass(frozen=True, eq=False)
class Application:
    """One application of a flat function.

    Attributes:
        flat: The function.
        numbers: Its numbers.
        outcome: The outcome, filled when it has run.
        before: The state before the first run, if the function has effects.
        unchanged: Whether all tensors that it takes besides arguments are known to be those that were lifted or saved.
        results: The results, if it has run already.
    """

    flat: TransformableFunction
    numbers: tuple[Any, ...]
    outcome: Outcome
    before: PreservedState | None = None
    unchanged: bool = False
    results: tuple[torch.Tensor, ...] | None = None

    @property
    def rule(self) -> Any:
        """The derivative rule: the call's `Pullback`, or the function."""
        return self.outcome.pullback or self.flat

    def run(self, tensors: Sequence[torch.Tensor], *, saves: bool = False) -> tuple[torch.Tensor, ...]:
        """Run the function on plain tensors.

        Args:
            tensors: The tensors that it takes.
            saves: Whether the tensors that a `Forward` returns for its backward go to the outcome instead.
        """
        if self.results is not None:
            return self.results
        flat, outcome = self.flat, self.outcome
        with torch.no_grad(), self.before.restored() if self.before and flat.repeats else nullcontext():
            found, outcome.spec, pullback = flat.run_compiled(tensors, self.numbers, unchanged=self.unchanged)
        outcome.pullback = pullback
        if saves and pullback is not None:
            found, outcome.saved = found[: pullback.count], found[pullback.count :]
        is_dual = is_dual_level()
        if not is_dual and (flat.returns_fresh if pullback is None else pullback.returns_fresh and saves):
            return tuple(without_bases(found, tensors))
        self._note_aliases(tensors, found)
        duplicates, inputs = outcome.duplicates, outcome.inputs  # autograd cannot save a returned input
        if is_dual:  # tangents are written to what is returned
            found = [r.clone() if index in duplicates or _is_expanded(r) else r for index, r in enumerate(found)]
        else:
            found = [
                placeholder(r.shape, r.dtype, r.device) if index in duplicates else r for index, r in enumerate(found)
            ]
        plain = [r.detach() if r.requires_grad or index in inputs else r for index, r in enumerate(found)]
        return tuple(without_bases(plain, tensors))

    def _note_aliases(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Note which results share memory with each other or with the tensors that were passed."""
        first: dict[int, int] = {}
        for index, result in enumerate(results):
            if first.setdefault(id(result), index) != index:
                self.outcome.duplicates[index] = first[id(result)]
        owner = {tensor.untyped_storage()._cdata: index for index, tensor in reversed(list(enumerate(tensors)))}
        for index, result in enumerate(results):
            operand = owner.get(result.untyped_storage()._cdata)
            if operand is None:
                continue
            tensor = tensors[operand]
            if result is tensor:
                self.outcome.inputs[index] = operand
            else:
                offset = int(result.storage_offset() - tensor.storage_offset())
                self.outcome.input_views[index] = operand, StridedView(tuple(result.shape), result.stride(), offset)


_autograd: Any = torch._C._autograd  # pyright: ignore  # checked with torch 2.11 and 2.13


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def apply(call: Application, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Apply a function to tensors of the current level, as one operation to all levels that act on them."""
    living = list(map(unwrap_if_dead, tensors))  # a pull-back may outlive its level
    if call.unchanged and not all(map(operator.is_, living, tensors)):
        call = dataclasses.replace(call, unchanged=False)
    tensors = living
    transform = current_transform()
    if isinstance(transform, Batching):
        return _apply_to_batch(call, tensors, transform)
    stack = levels()
    backwards, forwards = ambient(tensors)
    if not stack and not backwards and not forwards:
        return list(call.run(tensors))
    if not call.flat.may_save or forwards or stack != ([] if backwards else [Level.GRAD]):
        return Operation.at(transform, call, tensors)
    mask = tuple(map(requires_grad, tensors))
    again = bool(stack)
    forward = call.flat.derive(("forward", mask, again), lambda: Forward(call.flat, mask, again))
    outcome = Outcome()
    before = call.flat.effects.preserve(tensors) if call.flat.effects is not None else None
    application = Application(forward, call.numbers, outcome, before, call.unchanged)
    if stack:
        results = Operation.at(transform, application, tensors)
    else:  # it runs before autograd looks at the tensors, of which it is known then which ones matter
        found = application.run(tensors, saves=True)
        assert outcome.pullback is not None
        tensors = outcome.pullback.without_unconnected(tensors)
        application = dataclasses.replace(application, results=without_links(found, outcome.pullback))
        made = Operation.at(None, application, tensors)
        results = with_links(made, found, outcome.pullback, tensors, gradients_of_result)
    assert outcome.pullback is not None
    count = outcome.pullback.count
    call.outcome.spec, call.outcome.inputs, call.outcome.duplicates = outcome.spec, outcome.inputs, outcome.duplicates
    call.outcome.input_views = {index: view for index, view in outcome.input_views.items() if index < count}
    return list(results[:count])


def _apply_to_batch(call: Application, tensors: Sequence[torch.Tensor], transform: Batching) -> list[torch.Tensor]:
    """Apply the batched function one level below."""
    with transform.lower():
        plain, in_dims = transform.split(tensors)
        if all(dim is None for dim in in_dims):
            return apply(call, plain)
        flat, given = call.flat.batched(plain, in_dims, transform.size, transform.randomness)
        results = apply(dataclasses.replace(call, flat=flat), given)
    return transform.join(results, call.outcome.pop_out_dims())


def gradients_of_result(ctx: Any, index: int, cotangent: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gradients of what a result depends on, see `pygraph.autograd.result_links`.

    Args:
        ctx: The context of the call, of an `Operation`.
        index: The result.
        cotangent: Its cotangent.
    """
    again = _autograd._get_current_graph_task_keep_graph()
    saved = ctx.saved.restore(ctx, index)
    found = _gradients(ctx, *ctx.call.rule.pull_back_result(index, saved, cotangent, ctx.call.numbers))
    if not again:
        ctx.saved.note_differentiated(index)
    return found


def _gradients(ctx: Any, flat: TransformableFunction, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return what a backward of a call gives for these tensors, which may be a batch."""
    outcome = Outcome()
    batch = GradientBatch.among(tensors)
    if batch is None:
        call = Application(flat, ctx.call.numbers, outcome, ctx.call.before, unchanged=ctx.saved.is_own)
        gradients = apply(call, tensors)
    else:
        flat, plain = flat.batched(*batch.split(tensors), "error")
        found = apply(Application(flat, ctx.call.numbers, outcome, ctx.call.before), plain)
        gradients = batch.join(found, outcome.pop_out_dims())
    assert outcome.spec is not None
    return list(outcome.spec.unflatten(gradients))


class Operation(LevelFunction):
    """An application as one ``autograd.Function`` of one level."""

    @staticmethod
    def forward(call: Application, transform: Differentiating | None, *tensors: torch.Tensor) -> Any:
        """Apply the function one level below, or run it."""
        if transform is None:
            return call.run(tensors, saves=not is_dual_level())
        with transform.lower():
            results = apply(call, transform.unwrap(tensors))
        return tuple(transform.wrap(results))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Save the tensors that derivatives need."""
        call, _, *tensors = inputs
        rule = call.rule
        saved, call.outcome.saved = call.outcome.saved, []  # the call stays in the graph, and must not hold them
        ctx.call = call if call.results is None else dataclasses.replace(call, results=None)
        ctx.dtypes = [out.dtype for out in output]
        ctx.set_materialize_grads(False)
        floating = [out.is_floating_point() or out.is_complex() for out in output]
        # Tangents flow where gradients do not, as through a block under no_grad.
        moves = is_dual_level()
        known = [real and (moves or rule.has_gradient(index)) for index, real in enumerate(floating)]
        ctx.mark_non_differentiable(
            *(out for out, differentiable in zip(output, known, strict=True) if not differentiable)
        )
        ctx.floating = tuple(index for index, real in enumerate(floating) if real)
        ctx.saved = SavedTensors(rule, tensors, [*output, *saved])
        ctx.save_for_backward(*ctx.saved.saved)
        ctx.save_for_forward(*ctx.saved.saved)
        ctx.saved.hand_over()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        """Return gradients of the tensors, by the derivative rule."""
        mask = tuple(ctx.needs_input_grad[2:])
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * (2 + len(mask))
        rule = ctx.call.rule
        again = _autograd._get_current_graph_task_keep_graph()
        saved = ctx.saved.restore(ctx, rule.given(cotangents) if isinstance(rule, Pullback) else frozenset())
        flat, tensors = rule.pull_back(saved, mask, cotangents, ctx.call.numbers)
        found = iter(_gradients(ctx, flat, tensors))
        if not again and ctx.saved.release(cotangents, ctx.call.numbers):
            ctx.call = dataclasses.replace(ctx.call, before=None)
        return None, None, *(next(found) if wanted else None for wanted in mask)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Return tangents of the results, by the derivative rule."""
        call = ctx.call
        chosen = ctx.floating
        if not chosen:
            return (None,) * len(ctx.dtypes)
        flat, tensors = call.rule.push_forward(ctx.saved.restore(ctx), tangents[2:], chosen)
        moved = apply(Application(flat, call.numbers, Outcome(), call.before), tensors)
        if not levels():  # for a scalar, torch.func.jvp alone may find a tangent of another dtype
            moved = [tangent.to(ctx.dtypes[index]) for index, tangent in zip(chosen, moved, strict=True)]
        found = dict(zip(chosen, moved, strict=True))
        return tuple(found.get(index) for index in range(len(ctx.dtypes)))
