"""The laws of passes and stacks, on random functions and arguments, on both devices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings

import pygraph
from pygraph.errors import StageError, TraceError
from tests import extent
from tests.property.laws import (
    PASSES,
    check_composes,
    check_evaluates,
    check_no_leak,
    check_pass,
    check_stack_equals_eager,
    check_text_runs,
)
from tests.property.strategies import (
    AliasInput,
    Case,
    NumberInput,
    Stack,
    Step,
    TensorInput,
    cases,
    graph_stacks,
    stacks,
)


def examples(short: int, long: int) -> settings:
    """Settings for a number of examples in a short and in a long run."""
    return settings(
        max_examples=extent.examples(short, long),
        deadline=None,
        phases=set(Phase) - {Phase.explain},  # which takes minutes after a failure
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


def traced(case: Case, device: torch.device) -> tuple[pygraph.Program, object]:
    """The Program of a case and the function; cases that cannot be traced are another test's business."""
    fn = case.function(device)
    with torch.set_grad_enabled(case.module is None):
        try:
            return pygraph.trace(fn)(*case.arguments(device)), fn
        except TraceError:
            assume(False)
            raise


# ---- passes ----------------------------------------------------------------------------------------------------


@given(cases())
@examples(20, 600)
def test_a_trace_evaluates_to_what_the_function_gives(device: torch.device, case: Case) -> None:
    program, fn = traced(case, device)
    pygraph.check_program(program)
    check_evaluates(program, case, device, fn)


@given(cases(), stacks)
@examples(20, 600)
def test_passes_keep_the_meaning_and_their_input(device: torch.device, case: Case, stack: Stack) -> None:
    program, fn = traced(case, device)
    names = tuple(PASSES) if stack.names == ("jit",) else stack.names
    for name in names:
        try:
            program = check_pass(PASSES[name], program, case, device, fn)
        except StageError as error:
            if name != "select" or "overlap" not in str(error):  # a Program with a base has no made-up arguments
                raise


@given(cases(data_dependent=False), stacks)
@examples(14, 400)
def test_the_printed_text_runs(device: torch.device, case: Case, stack: Stack) -> None:
    program, _ = traced(case, device)
    check_text_runs(program, case, device)
    for name in ("devicify", "indirect", "graphify"):
        if name in stack.names or stack.names == ("jit",):
            program = PASSES[name](program)
            check_text_runs(program, case, device)


@given(cases(aliases=False))
@examples(6, 150)
def test_text_is_the_same_for_the_same_function(device: torch.device, case: Case) -> None:
    program, _ = traced(case, device)
    again, _ = traced(case, device)
    assert str(program) == str(again)
    assert str(pygraph.indirect(pygraph.devicify(program))) == str(pygraph.indirect(pygraph.devicify(again)))


# ---- stacks ----------------------------------------------------------------------------------------------------


# The second one lies at another multiple of 16 than the first one does.
_OF_ONE_MEMORY = (TensorInput((2, 3), torch.float32, "contiguous", 3), AliasInput(0, "tail"))

# It decides by a number, and returns an empty part of a closed-over tensor: the copy had no place in the order.
_DECIDING = Case(
    (*[TensorInput((3,))] * 2, NumberInput("cpu float"), TensorInput((3,))),
    (Step("number", 0, 3, 1, 1.0),),
    (0,),
    closed=(TensorInput((0,)),),
)


@given(cases(), stacks)
@example(_DECIDING, Stack(("indirect", "graphify", "select")))
@example(Case(_OF_ONE_MEMORY, (Step("unary"),), (0,)), Stack(("jit",)))
@examples(40, 1200)
def test_a_stack_equals_eager_and_held_results_never_change(device: torch.device, case: Case, stack: Stack) -> None:
    check_stack_equals_eager(case, stack, device)


@given(cases())
@examples(20, 600)
def test_jit_equals_eager(device: torch.device, case: Case) -> None:
    check_stack_equals_eager(case, pygraph.jit, device, calls=4)


@given(cases(data_dependent=False), graph_stacks)
@examples(14, 400)
def test_a_result_may_be_the_next_argument(device: torch.device, case: Case, stack: Stack) -> None:
    check_composes(case, stack, device)


@given(cases(), graph_stacks)
@examples(9, 250)
def test_nothing_stays_allocated(device: torch.device, case: Case, stack: Stack) -> None:
    with torch.no_grad():
        try:
            check_no_leak(case, stack, device)
        except (RuntimeError, IndexError, ValueError, TypeError):
            assume(False)  # the function itself raises


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_refuses_what_comes_too_early_or_too_late(device: torch.device, name: str) -> None:
    program = pygraph.graphify(pygraph.indirect(pygraph.trace(torch.sin)(torch.ones(2, device=device))))
    text = str(program)
    if name != "select":
        with pytest.raises(StageError, match=name):
            PASSES[name](program)
    else:
        with pytest.raises(StageError, match="graphify"):
            pygraph.select(pygraph.trace(torch.sin)(torch.ones(2, device=device)))
    assert str(program) == text
