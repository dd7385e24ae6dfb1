"""Gradients that a call of a Program would drop: it computes values, and autograd sees nothing of how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # checked with torch 2.11 and 2.13
from torch.autograd import forward_ad  # its _current_level: checked with torch 2.11 and 2.13
from torch.utils import _pytree as pytree

from pygraph.errors import ArgumentError, describe
from pygraph.ir.descriptors import Captured, Input, Mutation, PointerTable, Result, tensor_specs
from pygraph.ir.fields import ProgramFields

_REMEDY = "Call it under torch.no_grad(), call the function itself, jitted or not, or take the gradient inside it."


def check_gradients(program: ProgramFields, leaves: Sequence[Any]) -> None:
    """Raise ArgumentError if the traced function's results would have a gradient in this call.

    A trace fails if results require grad. So they do not where gradients are on as they were for the trace, and nothing
    requires grad that did not then. Otherwise they may.

    Args:
        program: The Program.
        leaves: The leaves of ``(args, kwargs)`` of a call that fits it.

    Raises:
        ArgumentError: They may; or an argument is one of a transform of ``torch.func``, or has a tangent.
    """
    tensors = [(number, leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for number, leaf in tensors:
        if is_functorch_wrapped_tensor(leaf) or _has_tangent(leaf):
            problem = f"{_path(program, number)} is one of a transform of torch.func, or has a tangent"
            remedy = "Call the function itself, jitted or not."
            raise ArgumentError(describe(f"{program.name}(…)", problem, expected="a plain tensor", remedy=remedy))
    if not torch.is_grad_enabled():
        return
    known = program.gradients
    new = next((_path(program, n) for n, leaf in tensors if leaf.requires_grad and (not known or n not in known)), None)
    if new is None and known is None:
        new = next((one.name for one in _captured(program.inputs) if one.value.requires_grad), None)
    if new is None:
        return
    expected = f"{'gradients off' if known is None else 'a tensor that does not'}, as when it was traced"
    problem = f"{new} requires grad, and its gradient would be dropped"
    raise ArgumentError(describe(f"{program.name}(…)", problem, expected=expected, remedy=_REMEDY))


def free_leaves(program: ProgramFields, differentiated: frozenset[int] | None) -> frozenset[int] | None:
    """The leaves that may require grad in calls of a new trace while gradients are on; None if nothing may.

    Args:
        program: The Program, at stage ``aten``.
        differentiated: The leaves that required grad in the traced call; None if gradients were off.
    """
    if not _may_require_grad(program):
        return frozenset(range(program.in_tree.num_leaves))
    return differentiated


def differentiated_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int] | None:
    """The leaves of the arguments of a call that require grad; None if gradients are off."""
    if not torch.is_grad_enabled():
        return None
    leaves = pytree.tree_leaves((args, kwargs))
    return frozenset(n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)


def _has_tangent(tensor: torch.Tensor) -> bool:
    dual: Any = forward_ad
    return bool(dual._current_level >= 0 and dual.unpack_dual(tensor).tangent is not None)


def _captured(inputs: Sequence[Input]) -> list[Captured]:
    return [one for one in inputs if isinstance(one, Captured)]


def _path(program: ProgramFields, number: int) -> str:
    """The name of an argument in errors."""
    found: list[Any] = list(program.inputs)
    for descriptor in program.inputs:
        if isinstance(descriptor, PointerTable):
            found += [slot.of for slot in descriptor.slots if slot.role == "argument"]
    names = [one.path for one in found if getattr(one, "leaf", None) == number]
    return names[0] if names else f"argument number {number}"


def _may_require_grad(program: ProgramFields) -> bool:
    """Whether a result, or an updated argument, is a tensor of real or complex numbers that is computed."""
    views = [alias.spec for alias in program.aliases if not alias.identical and alias.of not in ("argument", "result")]
    results = [one.spec for one in program.outputs if isinstance(one, Result)]
    updated = [program.inputs[one.input] for one in program.outputs if isinstance(one, Mutation)]
    specs = (*views, *results, *(getattr(one, "spec", None) for one in updated))
    return any(spec.dtype.is_floating_point or spec.dtype.is_complex for one in specs for spec in tensor_specs(one))
