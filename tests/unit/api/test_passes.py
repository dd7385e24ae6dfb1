"""Passes of users: transforms that stack with those of pygraph and are checked; Programs as functions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph import Program
from pygraph.errors import ArgumentError, ProgramError, StageError

aten = torch.ops.aten


@pygraph.transform
def double_sine(program: Program) -> Program:
    """Replace every sine by its double, so that it shows that the pass has run."""
    module = program.copy_graph()
    for node in list(module.graph.nodes):
        if node.target is aten.sin.default:
            with module.graph.inserting_after(node):
                double = module.graph.call_function(aten.mul.Tensor, (node, 2))
            double.meta = dict(node.meta)
            node.replace_all_uses_with(double, delete_user_cb=lambda user, double=double: user is not double)
    module.recompile()
    return program.replace(module=module)


def step(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + 1


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2 + 1


STACKS: dict[str, Callable[[Any], Any]] = {
    "jit of it": lambda fn: pygraph.jit(double_sine(fn)),
    "a list of passes": lambda fn: pygraph.jit(
        fn, passes=[pygraph.devicify, double_sine, pygraph.indirect, pygraph.graphify, pygraph.select]
    ),
    "by hand": lambda fn: pygraph.graphify(pygraph.indirect(double_sine(pygraph.devicify(fn)))),
    "evaluated": double_sine,
}


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(6.0, device=device).view(2, 3)


@pytest.mark.parametrize("name", STACKS)
def test_a_pass_of_a_users_runs_in_a_stack(x: torch.Tensor, name: str) -> None:
    fast = STACKS[name](step)
    for n in range(3):
        torch.testing.assert_close(fast(x + n), doubled(x + n))
    assert fast.cache_info().misses == 1


@pytest.mark.parametrize("name", ["jit of it", "a list of passes"])
def test_a_pass_of_a_users_runs_below_transforms_of_torch(x: torch.Tensor, name: str) -> None:
    fast = STACKS[name](step)
    torch.testing.assert_close(torch.func.vmap(fast)(x), doubled(x))
    torch.testing.assert_close(fast(x.clone().requires_grad_()).detach(), doubled(x))


def test_a_pass_runs_on_modules(x: torch.Tensor) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return step(x)

    fast = pygraph.jit(double_sine(Net()))
    assert isinstance(fast, torch.nn.Module)
    torch.testing.assert_close(fast(x), doubled(x))


def test_a_pass_rewrites_programs_and_is_in_their_history(x: torch.Tensor) -> None:
    program = pygraph.trace(step)(x)
    text = str(program)
    rewritten = double_sine(program)
    assert str(program) == text
    assert rewritten.history == ("trace", "double_sine")
    torch.testing.assert_close(rewritten(x), doubled(x))


def test_a_stack_that_records_nothing_is_completed(x: torch.Tensor) -> None:
    fast = pygraph.jit(pygraph.indirect(step, mechanism="host"), max_graphs=3)
    assert [one.name for one in fast.passes] == ["devicify", "indirect", "graphify", "select"]
    assert (fast.options.mechanism, fast.options.max_graphs) == ("host", 3)
    torch.testing.assert_close(fast(x), step(x))


def test_functions_with_passes_are_copied_and_pickled(x: torch.Tensor) -> None:
    fast = pygraph.jit(pygraph.devicify(step))
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert again.passes == fast.passes
        torch.testing.assert_close(again(x), step(x))


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_a_pass_that_comes_too_late(x: torch.Tensor) -> None:
    message = r"double_sine comes before graphify\. The right order is graphify\(double_sine\(step\)\)"
    with pytest.raises(StageError, match=message):
        double_sine(pygraph.graphify(step))
    with pytest.raises(StageError, match="double_sine comes before indirect"):
        pygraph.jit(step, passes=[pygraph.indirect, double_sine])
    with pytest.raises(StageError, match="stage 'regions'; expected 'aten'"):
        double_sine(pygraph.graphify(pygraph.trace(step)(x)))


def test_what_is_no_transform(x: torch.Tensor) -> None:
    for other in (torch.sin, [pygraph.devicify]):
        with pytest.raises(ArgumentError, match=r"in passes is no transform"):
            pygraph.jit(step, passes=[other])
    with pytest.raises(ArgumentError, match="stage='atens'; expected 'aten'"):
        pygraph.transform(lambda program: program, stage="atens")
    with pytest.raises(ArgumentError, match="expected a function from Program to Program"):
        pygraph.transform(3)
    with pytest.raises(ArgumentError, match=r"fuse=True and passes"):
        pygraph.jit(step, fuse=True, passes=[pygraph.graphify])


def test_what_a_pass_returns_is_checked(x: torch.Tensor) -> None:
    nothing = pygraph.transform(lambda program: None, name="nothing")
    with pytest.raises(ProgramError, match="it returns a NoneType; expected a Program"):
        nothing(pygraph.trace(step)(x))
    later = pygraph.transform(lambda program: program.replace(stage="kernels"), name="later")
    with pytest.raises(ProgramError, match="it leaves stage 'kernels'; expected 'aten'"):
        later(step)(x)

    @pygraph.transform
    def in_place(program: Program) -> Program:
        module = program.copy_graph()
        for node in module.graph.nodes:
            if node.target is aten.sin.default:
                node.target = aten.sin_.default
        return program.replace(module=module)

    with pytest.raises(ProgramError, match="sin_"):
        in_place(pygraph.trace(step)(x))


# ---- the laws ------------------------------------------------------------------------------------------------------


def test_the_laws_hold_for_the_passes_of_pygraph(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor, k: float) -> torch.Tensor:
        x.add_(torch.rand_like(x))
        return x * k

    program, kept = pygraph.trace(fn)(x.clone(), 2.0), x.clone()
    for transform in (pygraph.devicify, pygraph.indirect, pygraph.graphify):
        program = pygraph.check_transform(transform, program, x, 3.0)
    assert torch.equal(x, kept)


def test_the_laws_find_another_result(x: torch.Tensor) -> None:
    with pytest.raises(ProgramError, match="results or updated arguments differ"):
        pygraph.check_transform(double_sine, pygraph.trace(step)(x), x)


def test_the_laws_find_a_program_that_is_changed(x: torch.Tensor) -> None:
    @pygraph.transform
    def careless(program: Program) -> Program:
        for node in program.module.graph.nodes:
            if node.target is aten.add.Tensor:
                node.args = (node.args[0], 1.0)
        return program

    with pytest.raises(ProgramError, match=r"changes the Program that it is given\. Edit program\.copy_graph\(\)"):
        pygraph.check_transform(careless, pygraph.trace(step)(x), x)


# ---- Programs as functions -----------------------------------------------------------------------------------------


def test_a_program_is_a_function(x: torch.Tensor) -> None:
    program = pygraph.trace(step)(x)
    torch.testing.assert_close(program(x + 1), step(x + 1))
    fast = pygraph.jit(program)
    for n in range(3):
        torch.testing.assert_close(fast(x + n), step(x + n))
    assert fast.cache_info()[:3] == (2, 1, 1)
    assert fast.explain().to_dict()["fallbacks"] == []


def test_a_program_is_lowered_and_compiled(x: torch.Tensor) -> None:
    program = pygraph.indirect(pygraph.devicify(pygraph.trace(step)(x)))
    lowered = pygraph.jit(program).lower(x)
    assert lowered.program.stage == "regions"
    torch.testing.assert_close(lowered.compile()(x + 2), step(x + 2))


def test_a_program_is_for_arguments_like_those_of_its_trace(x: torch.Tensor) -> None:
    fast = pygraph.jit(pygraph.trace(step)(x))
    with pytest.raises(ArgumentError, match=r"args\[0\] is float32\[1, 3\]"):
        fast(x[:1])
    branch = pygraph.jit(pygraph.trace(lambda x, k: x + 1 if k > 1 else x)(x, 2))
    torch.testing.assert_close(branch(x, 2), x + 1)
    with pytest.raises(ArgumentError, match="which was baked in"):
        branch(x, 0)
    torch.testing.assert_close(branch(x, 2), x + 1)
