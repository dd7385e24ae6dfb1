"""Native operations: calls of one kind that autograd differentiates once, served in C++.

One is made of a call that `pygraph.autograd.operation` has served: what that found out holds for all calls that the
same native plans take. A call that they do not take, and a backward that is not of this kind, go the way in Python.
"""

# Contexts have attributes of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.autograd.backward import Backward
from pygraph.autograd.forward import Forward
from pygraph.autograd.operation import Application, Operation, gradients_of_result
from pygraph.autograd.outcome import Outcome
from pygraph.autograd.pullback import Pullback, ReadTensors
from pygraph.autograd.result_links import node_of_call, with_links, without_links
from pygraph.autograd.result_spec import ResultSpec, leaves_of_result
from pygraph.autograd.saved_tensors import SavedTensors
from pygraph.autograd.site import Site
from pygraph.calls import limits
from pygraph.calls.plan_description import is_plain
from pygraph.process import extension
from pygraph.runtime.devices import hold_accumulators


@dataclasses.dataclass(eq=False)
class Kind:
    """The facts of a kind of calls that Python needs.

    Attributes:
        forward: The function of such calls.
        pullback: Their derivative rule.
        read: The tensors that their backward reads.
        without_gradient: The results that have no gradient, by number.
        tries: How many backwards have been tried to be planned.
    """

    forward: Forward
    pullback: Pullback
    read: ReadTensors
    without_gradient: tuple[int, ...]
    tries: int = 0


def native_operation(
    site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], lifted: Sequence[torch.Tensor], result: Any
) -> Any:
    """Return the native operation of calls like one that has been served; None if there is none.

    Args:
        site: The site of the call.
        args: Positional arguments.
        kwargs: Keyword arguments.
        lifted: The tensors that the function closes over.
        result: The result of the call.
    """
    module, primal = extension.loaded(), site.primal
    served = _served_by(result)
    if module is None or served is None or primal.aliases or site.refusals or not is_plain_call(args, kwargs):
        return None
    forward, pullback, numbers = served.call.flat, served.call.outcome.pullback, served.call.numbers
    if not (isinstance(pullback, Pullback) and pullback.returns_fresh and served.saved.is_own):
        return None
    tensors = site.tensors(pytree.tree_leaves((args, kwargs)), lifted)
    read = pullback.read_tensors(tensors)
    plan = forward.plan_of(tensors, numbers)
    spec = served.call.outcome.spec
    if plan is None or not pullback.always_reads(read) or not pullback.returns_leaves(spec):
        return None
    no_gradient = tuple(index for index in range(pullback.count) if not pullback.has_gradient(index))
    return module.Operation({
        "call": (args, kwargs),
        "tensors": primal.tensors,
        "numbers": primal.numbers,
        "lifted": tuple(lifted),
        "forward": plan,
        "passed": tuple(index for index in range(len(tensors)) if index not in primal.lifted),
        "unread": tuple(read.unread),
        "returned": tuple(pullback.returned),
        "watched": tuple(read.watched),
        "mask": pullback.connected,
        "apply": _apply,
        "preserve": None if primal.effects is None else primal.effects.preserve,
        "kind": Kind(forward, pullback, read, no_gradient),
        **_structure(spec),
    })  # fmt: skip


def is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether arguments are nested tuples, lists and dicts, which C++ flattens as Python does."""
    return is_plain(pytree.tree_structure((args, kwargs)))


def _served_by(result: Any) -> Any:
    """Return the context of the operation that has computed a result; None if no `Operation` has."""
    for leaf in pytree.tree_leaves(result):
        function = node_of_call(leaf.grad_fn) if isinstance(leaf, torch.Tensor) else None
        if isinstance(function, Operation._backward_cls):  # pyright: ignore  # of FunctionMeta
            return function
    return None


def _structure(spec: ResultSpec) -> dict[str, Any]:
    """Describe the function's result: which leaves are tensors, and functions that C++ needs where it has objects."""
    assert spec.tree is not None
    tensors = set(spec.tensor_leaves)
    are_tensors = [index in tensors for index in range(len(spec.leaves))]
    if is_plain(spec.tree):
        return {"example": pytree.tree_unflatten(are_tensors, spec.tree), "flatten": None}
    unflatten = functools.partial(pytree.tree_unflatten, treespec=spec.tree)
    return {"example": are_tensors, "flatten": leaves_of_result, "unflatten": unflatten}


def _apply(saved: Any, outputs: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> Any:
    """Return the results of a call that has run, with their history."""
    held = hold_accumulators(tensors)
    pullback = saved.kind.pullback
    tensors = pullback.without_unconnected(tensors)
    plain = without_links(outputs, pullback) if pullback.dependencies else outputs
    results: Any = NativeOperation.apply(saved, plain, *tensors)  # pyright: ignore  # of torch._C._FunctionBase
    if pullback.dependencies:
        results = tuple(with_links(results, outputs, pullback, tensors, _gradients_of_result))
    del held
    return results


def _gradients_of_result(ctx: Any, index: int, cotangent: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gradients of what a result depends on, of the context of a `NativeOperation`."""
    if not hasattr(ctx, "saved"):
        _take(ctx, [None] * ctx.native.kind.pullback.count)
    return gradients_of_result(ctx, index, cotangent)


class NativeOperation(torch.autograd.function._SingleLevelFunction):
    """A call that has run natively, as one ``autograd.Function``."""

    @staticmethod
    def forward(ctx: Any, saved: Any, outputs: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> Any:  # pyright: ignore
        """Return the results, after which come the tensors that the call has saved."""
        ctx.set_materialize_grads(False)
        ctx.native = saved
        if saved.kind.without_gradient:
            ctx.mark_non_differentiable(*(outputs[index] for index in saved.kind.without_gradient))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:  # pyright: ignore
        """Return the gradients, natively if the backward is like others before."""
        gradients = ctx.native.backward(ctx.needs_input_grad, cotangents)
        if isinstance(gradients, tuple):
            return gradients
        if not hasattr(ctx, "saved"):
            _take(ctx, cotangents)
        return Operation.backward(ctx, *cotangents)


def _take(ctx: Any, cotangents: Sequence[torch.Tensor | None]) -> None:
    """Make a context one of an `Operation`, and have further backwards like this one run natively."""
    kind: Kind = ctx.native.kind
    row, versions, numbers, before, differentiated = ctx.native.take()
    outcome = Outcome()
    outcome.pullback = kind.pullback
    ctx.call = Application(kind.forward, numbers, outcome, before, unchanged=True)
    ctx.saved = SavedTensors.resumed(kind.pullback, kind.read, row, versions, differentiated)
    operation = ctx.native.operation
    if row is not None and not differentiated and kind.tries < limits.LIMITS.native_tries:
        description = _describe_backward(kind, tuple(ctx.needs_input_grad[2:]), row, cotangents, numbers)
        # There may be a plan that is not for calls like this one: a first backward often runs inside of autocast.
        if description is not None and description["backward"][1] is not operation.backward_plan:
            operation.plan_backward(description)


def _describe_backward(
    kind: Kind,
    mask: tuple[bool, ...],
    row: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    numbers: tuple[Any, ...],
) -> dict[str, Any] | None:
    """Describe backwards like this one; None if they have no native plan yet, or are not of all tensors."""
    pullback = kind.pullback
    given = pullback.given(cotangents)
    if mask != pullback.connected or torch.is_grad_enabled() or not given:
        return None
    kind.tries += 1
    flat, tensors = pullback.pull_back(row, mask, cotangents, numbers)
    if not isinstance(flat, Backward):
        return None
    plan = flat.plan_of_arguments(tensors, numbers)
    if plan is None:
        return None
    arity = pullback.inner.arity
    return {
        "backward": plan,
        "cotangents": flat.results,
        "absent": tuple(sorted(pullback.with_cotangents - given)),
        "read": tuple(index - arity for index in pullback.needed(row, given, numbers) if index >= arity),
        "positions": tuple(flat.positions),
        "strided": tuple((index, tuple(spec.shape), tuple(spec.stride)) for index, spec in flat.unsaved),
        "gradients": tuple(index for index, wanted in enumerate(pullback.mask) if wanted),
    }
