"""The trace that finds the answers to a call's questions, as the trace of the call that is told them.

The way of a call that decides by values on the device is not known before a trace has found it. That trace is the one
of calls that are told their way. Only these have arguments for it.
"""

# Leaves of arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pygraph.calls.function import Call
from pygraph.errors import TraceError
from pygraph.ir.descriptors import Baked
from pygraph.ir.paths import argument_path, flatten_with_path, is_answer
from pygraph.ir.program import Program
from pygraph.ir.value_keys import value_key
from pygraph.tracing.decisions import OtherPathError
from pygraph.tracing.function_kinds import Renaming, Traced

TracedProgram = tuple[Traced, Program]
"""A trace, and what passes have made of it."""


class _Found(NamedTuple):
    """A trace that was told no answers.

    Attributes:
        fn: The function that was traced.
        before: The leaves of the call in front of what stands for the answers.
        behind: Those behind it.
        answers: The answers that it has found.
        outcome: What has become of it.
    """

    fn: Callable[..., Any]
    before: list[Any]
    behind: list[Any]
    answers: list[str]
    outcome: TracedProgram | TraceError

    def is_of(self, leaves: Sequence[Any]) -> bool:
        """Whether these are the leaves of the same call, which is told the answers.

        What lies behind them must have its positions, as a trace knows leaves by these.
        """
        if self.behind and len(self.answers) != 1:
            return False
        expected = [*self.before, *self.answers, *self.behind]
        return len(expected) == len(leaves) and all(map(_is_same, expected, leaves))


class FoundAnswers:
    """Keeps the trace of a call that was told no answers until the same call is told them.

    Attributes:
        path: The answers that the last trace has found; None if it has found none, or was told them.
    """

    def __init__(self) -> None:
        self.path: tuple[str, ...] | None = None
        self._found: _Found | None = None

    def clear(self) -> None:
        """Forget the trace, when the call has ended."""
        self.path = self._found = None

    def keep(self, fn: Callable[..., Any], call: Call, outcome: TracedProgram | TraceError) -> None:
        """Keep the outcome of a trace that has found its answers.

        Args:
            fn: The function that was traced.
            call: The call.
            outcome: The trace, or why there is none.

        Raises:
            OtherPathError: It has found them: the call begins anew, and is told them.
        """
        path, self.path = self.path, None
        if path is None:
            return
        keyed, _ = flatten_with_path((call.args, call.kwargs))
        first = next(position for position, (where, _) in enumerate(keyed) if is_answer(where))
        leaves = [leaf for _, leaf in keyed]
        self._found = _Found(fn, leaves[:first], leaves[first + 1 :], list(path), outcome)
        raise OtherPathError(path)

    def take(self, fn: Callable[..., Any], call: Call, static: frozenset[int]) -> TracedProgram | TraceError | None:
        """The outcome of the trace that has found the answers which a call is told; None if there is no such trace.

        Args:
            fn: The function that is to be traced.
            call: The call.
            static: The leaves of numbers that are to be baked in from the start.
        """
        self.path, found = None, self._found
        if found is None or found.fn is not fn or not found.is_of(call.leaves):
            return None
        self._found, outcome = None, found.outcome
        if isinstance(outcome, TraceError):
            return outcome
        return _with_answers(fn, call, len(found.before), *outcome) if static <= outcome[0].static_leaves else None


def _is_same(one: Any, other: Any) -> bool:
    """Whether leaves are the same object, or values of which the same can be read."""
    if one is other or isinstance(one, torch.Tensor) or type(one) is not type(other):
        return one is other
    return value_key(one) == value_key(other)


def _with_answers(fn: Callable[..., Any], call: Call, first: int, traced: Traced, program: Program) -> TracedProgram:
    """The trace and the Program of a call that is told answers, from those of one that has found them.

    Args:
        fn: The function.
        call: The call.
        first: The position of the first answer, where the other call has what stands for them.
        traced: The trace of the other call.
        program: Its Program.
    """
    keyed, tree = flatten_with_path((call.args, call.kwargs))
    path_of = fn.path if isinstance(fn, Renaming) else str
    answers = [(leaf, key, value) for leaf, (key, value) in enumerate(keyed) if is_answer(key)]
    told = [Baked(path_of(argument_path(key)), leaf, value) for leaf, key, value in answers]

    def replaced(program: Program) -> Program:
        others = [one for one in program.baked if one.leaf != first]
        return program.replace(baked=tuple(sorted((*others, *told), key=lambda one: one.leaf)), in_tree=tree)

    return dataclasses.replace(traced, program=replaced(traced.program)), replaced(program)
