"""The reference evaluation: calling convention, errors before any change, aliasing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import ArgumentError
from pygraph.ir.descriptors import Alias, TensorSpec
from pygraph.ir.evaluate import alias_view, clone_strided, evaluate

X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((X, 1, 2), r"another structure than those that it was traced for: args\[2\] is unexpected"),
        ((X,), r"another structure than those that it was traced for: args\[1\] is missing"),
        ((X.double(), 1), r"args\[0\] is float64\[2, 3\] cpu; expected float32\[2, 3\] cpu"),
        ((X[:1], 1), r"args\[0\] is float32\[1, 3\] cpu"),
        ((torch.zeros(3, 2).t(), 1), r"args\[0\] is float32\[2, 3\] strides \(1, 2\) cpu"),
        ((2, 1), r"args\[0\] is int; expected float32"),
        ((X, X), r"args\[1\] is a tensor; expected a number"),
    ],
)
def test_a_wrong_call_is_refused_and_changes_nothing(args: tuple[Any, ...], text: str) -> None:
    program = pygraph.trace(lambda x, k: x.add_(k))(X.clone(), 1)
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    with pytest.raises(ArgumentError, match=text):
        evaluate(program, *args)
    for arg, old in zip(args, before, strict=True):
        assert torch.equal(arg, old) if isinstance(arg, torch.Tensor) else arg == old


@pytest.mark.parametrize(("made_with", "called_with"), [(2, 3), (True, False), ("a", "b"), (None, 1), (1.5, 2)])
def test_a_changed_static_value_is_refused(made_with: Any, called_with: Any) -> None:
    def fn(x: torch.Tensor, value: Any) -> torch.Tensor:
        return x[:value] if isinstance(value, int) else x if value else x + 1

    program = pygraph.trace(fn, static_argnums=(1,))(X, made_with)
    with pytest.raises(ArgumentError, match=r"args\[1\] is .*; expected .*, which was baked in"):
        evaluate(program, X, called_with)


def test_device_is_part_of_what_must_fit(device: torch.device) -> None:
    program = pygraph.trace(torch.sin)(X)
    with pytest.raises(ArgumentError, match=f"float32.* {device.type}"):
        evaluate(program, X.to(device))


def test_results_are_memory_of_their_own() -> None:
    program = pygraph.trace(lambda x: x.contiguous().to(torch.float32) + 0)(X)
    assert evaluate(program, X).data_ptr() != X.data_ptr()


def test_updates_are_visible_through_every_alias() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row = x[0]
        x.mul_(2)
        return row, x

    program = pygraph.trace(fn)(X.clone())
    x = X.clone()
    row, same = evaluate(program, x)
    assert same is x
    assert torch.equal(row, X[0] * 2)
    assert row.data_ptr() == x.data_ptr()


def test_a_swap_reads_the_old_contents() -> None:
    def swap(a: torch.Tensor, b: torch.Tensor) -> None:
        old = a.clone()
        a.copy_(b)
        b.copy_(old)

    a, b = torch.zeros(2), torch.ones(2)
    evaluate(pygraph.trace(swap)(a, b), a, b)
    assert (a.tolist(), b.tolist()) == ([1.0, 1.0], [0.0, 0.0])


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_every_stage_can_be_evaluated(device: torch.device, passes: int) -> None:
    def fn(x: torch.Tensor, k: float) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(k)
        return x * 2, x[0]

    x = torch.ones(2, 3, device=device)
    program = pygraph.trace(fn)(x, 1.0)
    for transform in (pygraph.devicify, pygraph.indirect, pygraph.graphify)[:passes]:
        program = transform(program)
    y = torch.ones(2, 3, device=device)
    double, row = evaluate(program, y, 2.0)
    assert torch.equal(double, torch.full((2, 3), 6.0, device=device))
    assert row.data_ptr() == y.data_ptr()
    assert torch.equal(y, torch.full((2, 3), 3.0, device=device))


@pytest.mark.parametrize("passes", [0, 1, 2, 3])
def test_a_kernel_may_lay_out_its_result_otherwise_than_its_fake(device: torch.device, passes: int) -> None:
    """Torch describes this one as contiguous; its kernels follow the gradient."""

    def fn(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.native_dropout_backward.default(x, mask, 2.0)

    x = torch.arange(6.0, device=device).view(3, 2).t()
    mask = torch.tensor([[True, False], [True, True], [False, True]], device=device).t()
    program = pygraph.trace(fn)(x, mask)
    for transform in (pygraph.devicify, pygraph.indirect, pygraph.graphify)[:passes]:
        program = transform(program)
    assert torch.equal(evaluate(program, x, mask), fn(x, mask))


@pytest.mark.parametrize("tensor", [X, X.t(), X[:, 1:], torch.ones(1).expand(4), X[1, 1]])
def test_clone_strided_keeps_the_layout(tensor: torch.Tensor) -> None:
    copy = clone_strided(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_alias_view_is_relative_to_its_base() -> None:
    base = X[1]
    alias = Alias("result", 0, "input", 0, TensorSpec((2,), (1,), X.dtype, X.device, 1))
    assert torch.equal(alias_view(alias, base), X[1, 1:])
    assert alias_view(Alias("result", 0, "input", 0, alias.spec, identical=True), base) is base
