"""A trace that has found the answers of its call, as the trace of calls that are told these."""

# Leaves of arguments are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses

from pygraph.calls.expected_paths import Path
from pygraph.calls.function import Call
from pygraph.calls.keys import flatten_call
from pygraph.ir.descriptors import Baked
from pygraph.ir.paths import ANSWERS, argument_path, flatten_with_path
from pygraph.ir.program import Program
from pygraph.tracing.function_kinds import Traced


def call_with_answers(call: Call, answers: Path) -> Call:
    """A call that is told these answers, and not those that it was told.

    The answers are the last keyword argument, so that all other leaves keep their positions.

    Args:
        call: The call.
        answers: The answers, as texts.
    """
    kwargs = {**call.kwargs, ANSWERS: answers}
    return Call(call.args, kwargs, *flatten_call(call.args, kwargs))


def traced_with_answers(traced: Traced, program: Program, call: Call) -> tuple[Traced, Program]:
    """The trace, and what passes have made of it, of a call that differs from theirs in its answers.

    Args:
        traced: The trace.
        program: The Program that passes have made of it.
        call: The call, of `call_with_answers`.
    """
    return dataclasses.replace(traced, program=_with_answers(traced.program, call)), _with_answers(program, call)


def _with_answers(program: Program, call: Call) -> Program:
    keyed, tree = flatten_with_path((call.args, call.kwargs))
    first = len(keyed) - len(call.kwargs[ANSWERS])
    found = [Baked(argument_path(path), leaf, value) for leaf, (path, value) in enumerate(keyed) if leaf >= first]
    kept = (one for one in program.baked if one.leaf < first)
    return program.replace(in_tree=tree, baked=(*kept, *found))
