"""Fake arguments: fakes that share storages as the caller's tensors share memory, symbols for numbers, paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from pygraph.errors import ContainerChangeError, TraceError
from pygraph.ir.descriptors import Argument, ScalarArgument
from pygraph.tracing.argument_changes import ArgumentChanges, stored_attribute
from pygraph.tracing.fake_arguments import FakeArguments, fake_arguments
from pygraph.tracing.number_uses import NumberUses


def fakes_of(*args: Any, static: frozenset[int] = frozenset(), **kwargs: Any) -> FakeArguments:
    return fake_arguments("f(…)", (args, kwargs), static, NumberUses(), lambda value: value)


def test_tensors_and_live_numbers_are_inputs_and_all_else_stays() -> None:
    made = fakes_of({"w": torch.ones(2)}, 3, "text", scale=0.5)
    assert made.paths == ["args[0]['w']", "args[1]", "args[2]", "kwargs['scale']"]
    assert [type(entry) for entry in made.inputs] == [Argument, ScalarArgument, ScalarArgument]
    (weights, count, text), kwargs = made.unflatten()
    assert isinstance(weights["w"], FakeTensor)
    assert isinstance(count, int)
    assert text == "text"
    assert made.values == [weights["w"], count, kwargs["scale"]]
    assert made.uses.leaves_of(made.uses.leaves) == {1, 3}


def test_a_static_number_is_no_input() -> None:
    made = fakes_of(torch.ones(2), 3, static=frozenset({1}))
    assert made.traced[1] == 3
    assert len(made.inputs) == 1


def test_tensors_that_share_memory_have_fakes_that_share_a_storage() -> None:
    whole = torch.arange(6.0)
    made = fakes_of(whole[1:3], whole[2:], whole, torch.ones(2))
    first, second, third, other = (made.fakes[leaf] for leaf in range(4))
    storages = {fake.untyped_storage()._cdata for fake in (first, second, third)}
    assert len(storages) == 1
    assert other.untyped_storage()._cdata not in storages
    assert [fake.storage_offset() for fake in (first, second, third)] == [1, 2, 0]


def test_a_tensor_that_is_passed_twice_has_one_fake() -> None:
    x = torch.ones(2)
    made = fakes_of(x, torch.ones(1), x)
    assert made.fakes[0] is made.fakes[2]


def test_a_fake_is_a_parameter_and_requires_grad_where_the_argument_does() -> None:
    made = fakes_of(torch.nn.Parameter(torch.ones(2)), torch.ones(2))
    assert isinstance(made.fakes[0], torch.nn.Parameter)
    assert made.fakes[0].requires_grad
    assert not made.fakes[1].requires_grad


@pytest.mark.parametrize(
    ("argument", "static", "problem"),
    [
        (torch.ones(2), frozenset({0}), r"args\[0\] is a tensor marked static"),
        (torch.ones(2).numpy(), frozenset(), r"args\[0\] is a NumPy array"),
        (torch.ones(2).to_sparse(), frozenset(), r"args\[0\] is not a plain strided tensor"),
    ],
)
def test_arguments_that_a_program_cannot_take(argument: Any, static: frozenset[int], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        fakes_of(argument, static=static)


def test_changes_of_containers_shapes_and_attributes_are_found() -> None:
    made = fakes_of([torch.ones(2, 3)])
    args, kwargs = made.unflatten()
    changes = ArgumentChanges(made, args, kwargs)
    changes.check("f(…)")
    assert changes.changed_attribute() is None
    made.fakes[0].note = 1  # pyright: ignore
    assert changes.changed_attribute() == "an argument.note"
    args[0].append(1)
    with pytest.raises(ContainerChangeError, match=r"it changes args\[0\], which it is passed"):
        changes.check("f(…)")
    args[0].pop()
    with made.mode:
        made.fakes[0].t_()
    with pytest.raises(TraceError, match=r"it changes the shape or strides of args\[0\]\[0\]"):
        changes.check("f(…)")


def test_an_attribute_that_is_stored_on_a_result() -> None:
    with fakes_of(torch.ones(2)).mode:
        result = torch.ones(2)
    assert stored_attribute(result) is None
    result.note = 1  # pyright: ignore
    assert stored_attribute(result) == "an attribute 'note'"
