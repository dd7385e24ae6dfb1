"""Partition of a joint Program: forward and backward compute what the whole computes, and the whole is not changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.autograd.partition import Partition, partition_program
from pygraph.autograd.specialization import with_numbers, without_results
from pygraph.errors import TraceError
from pygraph.ir.ops import cotangent


def joint_of(fn: Callable[..., torch.Tensor], count: int) -> Callable[..., Any]:
    """Return the function with the gradients of its first arguments, for a cotangent that is given later."""

    def joint(*args: Any) -> Any:
        with torch.enable_grad():
            wanted = [x.detach().requires_grad_() for x in args[:count]]
            result = fn(*wanted, *args[count:])
            given = cotangent(result.detach(), 0)
            gradients = torch.autograd.grad(result, wanted, given, allow_unused=True)
        return result.detach(), gradients

    return joint


def cut(
    fn: Callable[..., torch.Tensor], args: tuple[Any, ...], count: int = 1
) -> tuple[pygraph.program.Program, Partition]:
    program = pygraph.trace(joint_of(fn, count))(*args)
    return program, partition_program(program, "pullback")


def run(parts: Partition, args: tuple[Any, ...], given: torch.Tensor) -> tuple[Any, Any]:
    """Return the result, and the gradients for a cotangent."""
    result, saved, pullback = pygraph.evaluate(parts.forward, *args)
    assert pullback == "pullback"
    values: list[Any] = []
    for source in parts.sources:
        of = {"cotangent": [given], "saved": saved, "result": [result], "argument": args}[source.of]
        values.append(of[source.index])
    return result, pygraph.evaluate(parts.backward, *values)


X, Y = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([2.0, 3.0, 4.0])

CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...], int]] = {
    "a result is read again": (lambda x: x.exp(), (X,), 1),
    "an argument is read again": (lambda x: x.sin(), (X,), 1),
    "something is saved": (lambda x: (x.sin().exp() * x).sum(), (X,), 1),
    "two arguments": (lambda x, y: x * y, (X, Y), 2),
    "one of two": (lambda x, y: (x * y).tanh(), (X, Y), 1),
    "one without gradient": (lambda x, y: x.sin(), (X, Y), 2),
    "the same gradient twice": (lambda x, y: x + y, (X, Y), 2),
    "an expanded gradient": (lambda x: x.sum(), (X,), 1),
    "views": (lambda x: x.view(3, 1).expand(3, 2).t().contiguous(), (X,), 1),
    "one of several results": (lambda x: x.unbind(0)[2].exp() * x.split(1)[1].sin(), (X,), 1),
    "a live number": (lambda x, k: (x * k).sin() * k, (X, 1.5), 1),
    "constants": (lambda x: x * torch.arange(3.0) + torch.ones(3), (X,), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_both_parts_say_the_same_as_autograd(name: str) -> None:
    fn, args, count = CASES[name]
    program, parts = cut(fn, args, count)
    before = str(program)
    leaves = [x.clone().requires_grad_() for x in args[:count]]
    expected = fn(*leaves, *args[count:])
    given = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape)
    wanted = torch.autograd.grad(expected, leaves, given, allow_unused=True)
    result, gradients = run(parts, args, given)
    torch.testing.assert_close(result, expected.detach())
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs)
            assert mine.stride() == theirs.stride()
    assert str(program) == before


def test_what_is_there_anyway_is_not_saved() -> None:
    for name in ("a result is read again", "an argument is read again", "views", "constants", "a live number"):
        _, parts = cut(*CASES[name])
        assert all(source.of != "saved" for source in parts.sources) or name == "a live number", name  # x * k


def test_the_forward_has_nothing_of_the_backward() -> None:
    _, parts = cut(*CASES["something is saved"])
    assert "cotangent" not in str(parts.forward)
    targets = [str(node.target) for node in parts.forward.nodes if node.op == "call_function"]
    assert sorted(targets) == ["aten.exp.default", "aten.mul.Tensor", "aten.sin.default", "aten.sum.default"]


def test_random_draws_are_made_once() -> None:
    _, parts = cut(lambda x: torch.nn.functional.dropout(x, 0.5, True), (torch.ones(64),))
    torch.manual_seed(0)
    result, (gradient,) = run(parts, (torch.ones(64),), torch.ones(64))
    assert torch.equal(result, gradient)


def test_an_update_is_in_the_forward() -> None:
    state = torch.zeros(3)
    _, parts = cut(lambda x, s: x * s.add_(1), (X, state))
    result, (gradient,) = run(parts, (X, state), torch.ones(3))
    assert torch.equal(state, torch.ones(3))
    assert torch.equal(result, X)
    assert torch.equal(gradient, torch.ones(3))


def test_an_update_that_depends_on_a_gradient_is_refused() -> None:
    def joint(x: torch.Tensor, state: torch.Tensor) -> Any:
        given = cotangent(x, 0)
        state.add_(given)
        return x * 2, (given * 2,)

    program = pygraph.trace(joint)(X, torch.zeros(3))
    with pytest.raises(TraceError, match="depends on a gradient"):
        partition_program(program, None)


def test_results_can_be_left_out() -> None:
    _, parts = cut(*CASES["two arguments"])
    only = without_results(parts.backward, [0])
    assert sum(node.op == "call_function" for node in only.nodes) == 1
    values = {"cotangent": torch.ones(3), "argument": None}
    args = [values["cotangent"] if s.of == "cotangent" else (X, Y)[s.index] for s in parts.sources]
    first, second = pygraph.evaluate(only, *args)
    assert first is None
    torch.testing.assert_close(second, X)


def test_numbers_can_be_baked_in() -> None:
    _, parts = cut(*CASES["a live number"])
    numbers = {i: 1.5 for i, source in enumerate(parts.sources) if source.spec is None}
    assert numbers
    baked = with_numbers(parts.backward, numbers)
    assert len(baked.inputs) == len(parts.backward.inputs) - len(numbers)
    assert {b.leaf for b in baked.baked} == set(numbers)
