"""Partition of a Program that computes results and gradients into a forward and a backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from pygraph.autograd.backward_graph import BackwardGraph, NotSavedError, Source
from pygraph.autograd.forward_graph import forward_program
from pygraph.autograd.joint_graph import JointGraph
from pygraph.autograd.value_numbering import ValueNumbering
from pygraph.ir.check import check_program
from pygraph.ir.program import Program


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """A forward and a backward.

    Attributes:
        forward: A Program from arguments to ``(result, saved, pullback)``.
        backward: A Program from its sources' values to a tuple of gradients, None where there is none.
        sources: Where the backward's arguments come from, in order.
        captured: The tensors that the backward reads where the function closes over them.
        numbering: The value numbers of both.
        forward_numbers: The value numbers of what the forward returns and updates.
        available: The saved values and results that a backward may take, by value number.
    """

    forward: Program
    backward: Program
    sources: tuple[Source, ...]
    captured: tuple[torch.Tensor, ...]
    numbering: ValueNumbering
    forward_numbers: frozenset[int]
    available: Mapping[int, Source]


def partition_program(joint: Program, pullback: object) -> Partition:
    """Cut a joint Program where gradients begin to be needed.

    As in autograd, the forward computes what the results need, and saves what the backward reads of it; views of what
    is there anyway, constants and numbers are computed again instead.

    IR before::

        exp = aten.exp.default(x)
        cotangent = pygraph.cotangent.default(exp, 0)
        mul = aten.mul.Tensor(cotangent, exp)
        return (exp, mul)  # (result, gradients)

    IR after, the forward::

        exp = aten.exp.default(x)
        return (exp,)  # (result, saved, pullback)

    and the backward::

        mul = aten.mul.Tensor(cotangent, exp)
        return (mul,)

    Args:
        joint: A Program at stage ``aten`` whose result is ``(result, gradients)``, and in which ``pygraph.cotangent``
            stands for the gradients of results.
        pullback: The constant that the forward returns as the third part of its result.

    Returns:
        Both Programs, and where the backward's arguments come from.

    Raises:
        TraceError: The forward's effects depend on a gradient, or the backward needs what cannot be saved.
    """
    numbering = ValueNumbering()
    graph = JointGraph(joint, numbering)
    backward = BackwardGraph(graph)
    forward = forward_program(graph, backward.saved, pullback)
    return Partition(
        check_program(forward), check_program(backward.program), tuple(backward.sources), backward.captured(),
        numbering, graph.forward_numbers(),
        {number: source for number, source in backward.taken.items() if source.of in ("saved", "result")},
    )  # fmt: skip


def another_backward(joint: Program, partition: Partition) -> tuple[Program, tuple[Source, ...]] | None:
    """Return the backward of another joint Program of the same function, for a forward that has run.

    Args:
        joint: A joint Program, of cotangents of other results.
        partition: The forward that has run, and the backward that it saved for.

    Returns:
        The backward and where its arguments come from; None if the forward is another one, or has not saved them.
    """
    graph = JointGraph(joint, partition.numbering)
    try:
        backward = BackwardGraph(graph, partition.available)
    except NotSavedError:
        return None
    captured = {tensor.data_ptr() for tensor in partition.captured}
    if any(tensor.data_ptr() not in captured for tensor in backward.captured()):
        return None
    if any(source not in partition.sources for source in backward.sources if source.of == "argument"):
        return None
    if graph.forward_numbers() != partition.forward_numbers:
        return None
    return check_program(backward.program), tuple(backward.sources)
