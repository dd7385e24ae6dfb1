"""Calls of transformed functions inside ``vmap``, ``grad`` and ``jvp``, and under autograd.

One call goes this way. `find_site` looks up, or finds out, what is known of such calls (`Site`): which tensors the
function closes over that carry gradients or batches. These are passed like arguments from there on. `apply` goes
down level by level: a derivative gets an ``autograd.Function`` around the call, ``vmap`` replaces the function by its
batched one, and the last derivative by its `Forward`. What arrives at the bottom are plain tensors, on which the
function that was derived on the way runs by its own engine. A backward goes the same way with the function that
computes it.
"""

# Tensors of torch.func and its stack of transforms have no public names; arguments and results are of any type.
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

from pygraph.autograd.flat import Flat
from pygraph.autograd.interpreters import Batching, Differentiating, LevelFunction, current_transform
from pygraph.autograd.joint import Forward, NotCompiledError
from pygraph.autograd.kept import Kept
from pygraph.autograd.levels import GradientBatch, Level, ambient, is_dual_level, levels, requires_grad
from pygraph.autograd.outcome import Outcome, View
from pygraph.autograd.repeating import Before
from pygraph.autograd.sharing import without_bases
from pygraph.autograd.site import Site
from pygraph.autograd.unread import without_memory
from pygraph.calls.surroundings import InlineError


def compose(site: Site, leaves: Sequence[Any], lifted: Sequence[torch.Tensor] | None = None) -> Any:
    """Call a function where its call is part of something larger.

    Args:
        site: What is known of such calls.
        leaves: The leaves of ``(args, kwargs)``.
        lifted: The tensors that the function closes over now; None to look them up.

    Returns:
        What the function returns, as it is at this level.

    Raises:
        InlineError: The call must run as it is; nothing has been changed.
    """
    tensors = site.tensors(leaves, lifted)
    stack = levels()
    reason = site.refusal(stack, tensors)
    if reason is not None:
        raise InlineError(reason)
    outcome = Outcome()
    try:
        call = Call(site.primal, site.numbers(leaves), outcome, undisturbed=lifted is not None and not stack)
        results = apply(call, tensors)
    except NotCompiledError:
        raise InlineError("its forward does not run as a graph") from None
    except RuntimeError as error:
        site.note_failure(stack, error)
        raise
    assert outcome.rest is not None
    for index, operand in outcome.same.items():
        results[index] = tensors[operand]
    for index, (operand, view) in outcome.views.items():
        if not stack and index not in site.primal.shared:
            tensor = tensors[operand]
            results[index] = view.of(tensor if results[index].requires_grad else tensor.detach())
    for index, shared in site.primal.shared.items():
        results[index] = shared.of(tensors[shared.operand])
    for index, first in outcome.twins.items():
        results[index] = results[first]
    return outcome.rest.join(results)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One application of a function.

    Attributes:
        flat: The function.
        numbers: Its numbers.
        outcome: Where goes what it returns besides tensors.
        before: What it first found, if it is not the same function twice.
        undisturbed: Whether what it takes besides arguments is known to be as it was: what it closes over where it
            finds it, what was saved as it was saved.
    """

    flat: Flat
    numbers: tuple[Any, ...]
    outcome: Outcome
    before: Before | None = None
    undisturbed: bool = False

    @property
    def rule(self) -> Any:
        """What knows how to differentiate it."""
        return self.outcome.pullback or self.flat

    def run(self, tensors: Sequence[torch.Tensor], *, saves: bool = False) -> tuple[torch.Tensor, ...]:
        """Run it on plain tensors.

        Args:
            tensors: What it takes.
            saves: Whether what a `Forward` returns for its backward goes to the outcome instead.
        """
        with torch.no_grad(), self.before.again() if self.before and self.flat.repeats else nullcontext():
            found, self.outcome.rest, pullback = self.flat.compiled(tensors, self.numbers, undisturbed=self.undisturbed)
        self.outcome.pullback = pullback
        if saves and pullback is not None:
            found, self.outcome.saved = found[: pullback.count], found[pullback.count :]
        is_dual = is_dual_level()
        if not is_dual and (self.flat.returns_fresh if pullback is None else pullback.returns_fresh and saves):
            return tuple(without_bases(found, tensors))
        self._note_shared(tensors, found)
        twins, same = self.outcome.twins, self.outcome.same  # what is passed and returned cannot be kept
        if is_dual:  # tangents are written to what is returned
            found = [r.clone() if index in twins or _is_expanded(r) else r for index, r in enumerate(found)]
        else:
            found = [
                without_memory(r.shape, r.dtype, r.device) if index in twins else r for index, r in enumerate(found)
            ]
        plain = [r.detach() if r.requires_grad or index in same else r for index, r in enumerate(found)]
        return tuple(without_bases(plain, tensors))

    def _note_shared(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Note which results are memory of what was passed."""
        first: dict[int, int] = {}
        for index, result in enumerate(results):
            if first.setdefault(id(result), index) != index:
                self.outcome.twins[index] = first[id(result)]
        owner = {tensor.untyped_storage()._cdata: index for index, tensor in reversed(list(enumerate(tensors)))}
        for index, result in enumerate(results):
            operand = owner.get(result.untyped_storage()._cdata)
            if operand is None:
                continue
            tensor = tensors[operand]
            if result is tensor:
                self.outcome.same[index] = operand
            else:
                offset = int(result.storage_offset() - tensor.storage_offset())
                self.outcome.views[index] = operand, View(tuple(result.shape), result.stride(), offset)


_autograd: Any = torch._C._autograd  # pyright: ignore  # checked with torch 2.11 and 2.13


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def apply(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a call on tensors of the current level, as one operation to all that differentiates or batches them."""
    living = list(map(unwrap_if_dead, tensors))  # a pull-back may outlive its level
    if call.undisturbed and not all(map(operator.is_, living, tensors)):
        call = dataclasses.replace(call, undisturbed=False)
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
    before = call.flat.effects.before(tensors) if call.flat.effects is not None else None
    results = Operation.at(transform, Call(forward, call.numbers, outcome, before, call.undisturbed), tensors)
    assert outcome.pullback is not None
    count = outcome.pullback.count
    call.outcome.rest, call.outcome.same, call.outcome.twins = outcome.rest, outcome.same, outcome.twins
    call.outcome.views = {index: view for index, view in outcome.views.items() if index < count}
    return results[:count]


def _apply_to_batch(call: Call, tensors: Sequence[torch.Tensor], transform: Batching) -> list[torch.Tensor]:
    """One call for all of a batch, one level below."""
    with transform.lower():
        plain, dims = transform.split(tensors)
        if all(dim is None for dim in dims):
            return apply(call, plain)
        flat, given = call.flat.batched(plain, dims, transform.size, transform.randomness)
        results = apply(dataclasses.replace(call, flat=flat), given)
    return transform.join(results, call.outcome.take_dims())


class Operation(LevelFunction):
    """A call as one operation of one level."""

    @staticmethod
    def forward(call: Call, transform: Differentiating | None, *tensors: torch.Tensor) -> Any:
        """Make it one level below, or run it."""
        if transform is None:
            return call.run(tensors, saves=not is_dual_level())
        with transform.lower():
            results = apply(call, transform.unwrap(tensors))
        return tuple(transform.wrap(results))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keep what derivatives need."""
        call, _, *tensors = inputs
        rule = call.rule
        saved, call.outcome.saved = call.outcome.saved, []  # the call stays, and must not hold it
        ctx.call, ctx.dtypes = call, [out.dtype for out in output]
        ctx.set_materialize_grads(False)
        floating = [out.is_floating_point() or out.is_complex() for out in output]
        # Tangents flow where gradients do not, as through a block under no_grad.
        moves = is_dual_level()
        known = [real and (moves or rule.has_gradient(index)) for index, real in enumerate(floating)]
        ctx.mark_non_differentiable(
            *(out for out, differentiable in zip(output, known, strict=True) if not differentiable)
        )
        ctx.floating = tuple(index for index, real in enumerate(floating) if real)
        ctx.kept = Kept(rule, tensors, [*output, *saved])
        ctx.save_for_backward(*ctx.kept.saved)
        ctx.save_for_forward(*ctx.kept.saved)
        ctx.kept.is_saved()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        """Gradients of the tensors, by the function's pull-back."""
        mask = tuple(ctx.needs_input_grad[2:])
        if all(cotangent is None for cotangent in cotangents):
            return (None,) * (2 + len(mask))
        again = _autograd._get_current_graph_task_keep_graph()
        kept = ctx.kept.restore(ctx, cotangents)
        flat, tensors = ctx.call.rule.pull_back(kept, mask, cotangents, ctx.call.numbers)
        outcome = Outcome()
        batch = GradientBatch.among(tensors)
        if batch is None:
            call = Call(flat, ctx.call.numbers, outcome, ctx.call.before, undisturbed=ctx.kept.is_own)
            gradients = apply(call, tensors)
        else:
            flat, plain = flat.batched(*batch.split(tensors), "error")
            found = apply(Call(flat, ctx.call.numbers, outcome, ctx.call.before), plain)
            gradients = batch.join(found, outcome.take_dims())
        assert outcome.rest is not None
        found = iter(outcome.rest.join(gradients))
        if not again and ctx.kept.release(cotangents, ctx.call.numbers):
            ctx.call = dataclasses.replace(ctx.call, before=None)
        return None, None, *(next(found) if wanted else None for wanted in mask)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Tangents of the results, by the function's push-forward."""
        call = ctx.call
        chosen = ctx.floating
        if not chosen:
            return (None,) * len(ctx.dtypes)
        flat, tensors = call.rule.push_forward(ctx.kept.restore(ctx), tangents[2:], chosen)
        moved = apply(Call(flat, call.numbers, Outcome(), call.before), tensors)
        if not levels():  # for a scalar, torch.func.jvp alone may find a tangent of another dtype
            moved = [tangent.to(ctx.dtypes[index]) for index, tangent in zip(chosen, moved, strict=True)]
        found = dict(zip(chosen, moved, strict=True))
        return tuple(found.get(index) for index in range(len(ctx.dtypes)))
