"""Transforms on functions, modules and Programs: every legal order works, every illegal one names the right one."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.errors import ArgumentError, StageError

TRANSFORMS: dict[str, Any] = {
    "devicify": pygraph.devicify,
    "indirect": pygraph.indirect,
    "graphify": pygraph.graphify,
    "select": pygraph.select,
}
ORDER = list(TRANSFORMS)


def is_legal(names: tuple[str, ...]) -> bool:
    positions = [ORDER.index(name) for name in names]
    return positions == sorted(set(positions)) and ("select" not in names or "graphify" in names)


STACKS = [names for count in (1, 2, 3, 4) for names in itertools.permutations(ORDER, count)]
LEGAL = [names for names in STACKS if is_legal(names)]
ILLEGAL = [names for names in STACKS if not is_legal(names)] + [(name, name) for name in ORDER[:3]]


# devicify twice is the same as once.
ILLEGAL_PAIRS = [names for names in ILLEGAL if len(names) == 2 and names != ("devicify", "devicify")]


def step(x: torch.Tensor, k: float = 2.0) -> torch.Tensor:
    """Scale the sine."""
    return torch.sin(x) * k


def apply(names: tuple[str, ...], fn: Any) -> Any:
    for name in names:
        fn = TRANSFORMS[name](fn)
    return fn


@pytest.mark.parametrize("names", LEGAL, ids="-".join)
def test_a_legal_stack_gives_the_results_of_eager(names: tuple[str, ...], device: torch.device) -> None:
    fn = apply(names, step)
    for seed in range(3):
        x = torch.full((3,), float(seed), device=device)
        torch.testing.assert_close(fn(x, 0.5 + seed), step(x, 0.5 + seed))


@pytest.mark.parametrize("names", LEGAL, ids="-".join)
def test_a_legal_stack_on_programs(names: tuple[str, ...], device: torch.device) -> None:
    x = torch.ones(3, device=device)
    first = pygraph.trace(step)(x, 2.0)
    text = str(first)
    program = apply(names, first)
    assert isinstance(program, pygraph.Program)
    assert str(first) == text
    assert [name for name in program.history if name in ORDER] == list(names)
    torch.testing.assert_close(pygraph.evaluate(program, x, 3.0), step(x, 3.0))


@pytest.mark.parametrize("names", LEGAL, ids="-".join)
def test_a_legal_stack_on_modules(names: tuple[str, ...], device: torch.device) -> None:
    module = nn.Linear(3, 3).to(device)
    x = torch.ones(2, 3, device=device)
    with torch.no_grad():
        transformed = apply(names, module)
        torch.testing.assert_close(transformed(x), module(x))
    assert isinstance(transformed, nn.Module)


@pytest.mark.parametrize("names", ILLEGAL, ids="-".join)
def test_an_illegal_stack_fails_before_tracing(names: tuple[str, ...]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("traced")

    with pytest.raises(StageError) as caught:
        apply(names, fn)
    text = str(caught.value)
    assert "The right order is " in text
    right = text.partition("The right order is ")[2].rstrip(".")
    inner = [name for name in reversed(right.replace(")", "").split("(")) if name in ORDER]
    assert is_legal(tuple(inner))


@pytest.mark.parametrize("names", ILLEGAL_PAIRS, ids="-".join)
def test_an_illegal_stack_fails_on_programs(names: tuple[str, ...], device: torch.device) -> None:
    program = pygraph.trace(step)(torch.ones(3, device=device), 2.0)
    with pytest.raises(StageError):
        apply(names, program)


def test_the_message_of_an_illegal_stack() -> None:
    with pytest.raises(StageError) as caught:
        pygraph.indirect(pygraph.graphify(step))
    assert str(caught.value) == (
        "indirect(graphify(step)): indirect comes before graphify. The right order is graphify(indirect(step))."
    )


@pytest.mark.parametrize("name", ORDER[:3])
def test_signature_and_docstring_are_kept(name: str) -> None:
    fn = TRANSFORMS[name](step)
    assert fn.__name__ == "step"
    assert fn.__doc__ == "Scale the sine."
    assert inspect.signature(fn) == inspect.signature(step)


def test_decorators_with_and_without_options(device: torch.device) -> None:
    @pygraph.select
    @pygraph.graphify(max_graphs=2)
    @pygraph.indirect
    @pygraph.devicify()
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert fn.options.max_graphs == 2
    assert fn(torch.ones(2, device=device)).tolist() == [2.0, 2.0]


def test_options_of_inner_transforms_are_kept() -> None:
    timer = lambda run: 1.0  # noqa: E731
    fn = pygraph.select(pygraph.graphify(step, max_graphs=3, strict=True), timer=timer)
    assert (fn.options.max_graphs, fn.options.strict, fn.options.selection.timer) == (3, True, timer)


def test_a_transformed_function_inside_another(device: torch.device) -> None:
    inner = pygraph.jit(step)
    outer = pygraph.jit(lambda x: inner(x, 3.0) + 1)
    x = torch.ones(3, device=device)
    torch.testing.assert_close(outer(x), step(x, 3.0) + 1)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_inside_torch_func(transform: Any, device: torch.device) -> None:
    fn = lambda x: (x * x).sum()  # noqa: E731
    x = torch.arange(6.0, device=device).view(2, 3)
    torch.testing.assert_close(transform(pygraph.jit(fn))(x), transform(fn)(x))
    torch.testing.assert_close(pygraph.jit(transform(fn))(x), transform(fn)(x))


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"not callable; expected a function or an nn\.Module"):
        pygraph.graphify(3)
