"""lower: updates become writes, in place only where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import StageError
from pygraph.ir.descriptors import Mutation
from pygraph.ir.program import Program
from pygraph.lowering.aten import lower, written_inputs

aten = torch.ops.aten


def targets(program: Program) -> list[Any]:
    return [node.target for node in program.nodes if node.op == "call_function"]


def lowered(fn: Callable[..., Any], *args: Any) -> Program:
    traced = pygraph.trace(fn)(*args)
    text = str(traced)
    program = pygraph.check_program(lower(traced))
    assert str(traced) == text
    return program


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def rotate(a: torch.Tensor, b: torch.Tensor) -> None:
    old = a + 0
    a.copy_(b * 1)
    b.copy_(old)


def read_before(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    before = a * 2
    a.add_(b)
    return before


def read_later(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    old = a.clone()
    a.add_(b)
    return old * 3


def view_read_later(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    first = a[:1].clone()
    a.mul_(b)
    return first + 1


def result_is_the_new_value(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(b)
    return a.clone()


def own_value_twice(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(a)
    a.mul_(a)


def through_a_view_of_itself(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(a.flip(0))


def from_the_other_updated(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(b)
    b.add_(a)


def both_the_same_value(a: torch.Tensor, b: torch.Tensor) -> None:
    new = a + b
    a.copy_(new)
    b.copy_(new)


def part(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[1:].add_(b[:-1])
    return a.sum()


def index_put(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[torch.tensor([0, 2], device=a.device)] = b[:2]
    return a * 2


def reversed_copy(a: torch.Tensor, b: torch.Tensor) -> None:
    a.copy_(a.flip(0))


def to_another_dtype(a: torch.Tensor, b: torch.Tensor) -> None:
    a.copy_(b.double().exp())


def several_steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(0.9).add_(b, alpha=0.1)
    b.mul_(a).sub_(1)
    return (a + b).sum()


def a_step_read_later(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.mul_(0.9)
    between = a.clone()
    a.add_(b)
    return between * 2


def a_step_that_another_becomes(a: torch.Tensor, b: torch.Tensor) -> None:
    a.mul_(2)
    b.copy_(a)
    a.add_(1)


def steps_on_lists(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([a, b], 0.9)
    torch._foreach_addcmul_([a, b], [a + 1, b + 1], [b * 2, a * 2], 0.5)
    return a.sum() + b.sum()


def one_of_a_list_is_read_later(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    new = torch._foreach_mul([a, b], 2.0)
    a.copy_(new[0])
    old = b * 3
    b.copy_(new[1])
    return old


def one_of_a_list_is_no_update(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    new = torch._foreach_add([a, b], 1.0)
    a.copy_(new[0])
    return new[1]


def a_list_with_itself(a: torch.Tensor, b: torch.Tensor) -> None:
    torch._foreach_mul_([a, b], [a, b])


def one_element_twice(a: torch.Tensor, b: torch.Tensor) -> None:
    new = torch._foreach_mul([a, a], [2.0, 3.0])
    a.copy_(new[0])
    b.copy_(new[1])


FUNCTIONS = [
    swap, rotate, read_before, read_later, view_read_later, result_is_the_new_value, own_value_twice,
    through_a_view_of_itself, from_the_other_updated, both_the_same_value, part, index_put, reversed_copy,
    to_another_dtype, several_steps, a_step_read_later, a_step_that_another_becomes, steps_on_lists,
    one_of_a_list_is_read_later, one_of_a_list_is_no_update, a_list_with_itself, one_element_twice,
]  # fmt: skip

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(1.0, 4.0),
    "strided": lambda: torch.arange(1.0, 10.0)[::3],
    "offset": lambda: torch.arange(1.0, 9.0)[2:5],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_lowered_is_eager(fn: Callable[..., Any], layout: Callable[[], torch.Tensor], device: torch.device) -> None:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        a, b = layout(), layout()
        return (a.to(device) if a.is_contiguous() else a), (b.to(device) * 10 if b.is_contiguous() else b)

    program = lowered(fn, *make())
    assert not any(isinstance(d, Mutation) for d in program.outputs)
    mine, eager = make(), make()
    for _ in range(2):
        got, expected = pygraph.evaluate(program, *mine), fn(*eager)
        assert torch.equal(got, expected) if expected is not None else got is None
        for a, b in zip(mine, eager, strict=True):
            assert torch.equal(a, b)


def test_an_update_that_nobody_else_sees_is_in_place() -> None:
    program = lowered(lambda a, b: (a.add_(b), None)[1], torch.ones(2), torch.ones(2))
    assert targets(program) == [aten.add_.Tensor]


def test_a_cache_update_is_in_place() -> None:
    program = lowered(index_put, torch.ones(3), torch.ones(3))
    assert aten.index_put_.default in targets(program)
    assert aten.copy_.default not in targets(program)


def test_every_step_of_an_update_is_in_place() -> None:
    program = lowered(several_steps, torch.ones(3), torch.ones(3))
    assert targets(program)[:4] == [aten.mul_.Tensor, aten.add_.Tensor, aten.mul_.Tensor, aten.sub_.Tensor]
    device = pygraph.default_device()
    program = lowered(steps_on_lists, torch.ones(3, device=device), torch.ones(3, device=device))
    found = targets(program)
    assert aten._foreach_mul_.Scalar in found
    assert aten._foreach_addcmul_.Scalar in found
    assert aten.copy_.default not in found


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers_copy_nothing(optimizer: Any, foreach: bool) -> None:
    """As in eager, they update parameters and their own state where they are."""
    options = {} if optimizer is torch.optim.SGD else {"capturable": True}
    device = pygraph.default_device()
    layer = torch.nn.Linear(3, 3).to(device)
    made = optimizer(layer.parameters(), lr=0.1, weight_decay=0.1, foreach=foreach, **options)

    def step(x: torch.Tensor) -> None:
        layer(x).sum().backward()
        made.step()
        made.zero_grad()

    x = torch.ones(2, 3, device=device)
    step(x)  # makes the state
    assert aten.copy_.default not in targets(lowered(step, x))


@pytest.mark.parametrize("fn", [read_later, view_read_later, through_a_view_of_itself])
def test_what_is_read_after_keeps_its_contents(fn: Callable[..., Any]) -> None:
    program = lowered(fn, torch.ones(3), torch.ones(3))
    in_place = [t for t in targets(program) if t in (aten.add_.Tensor, aten.mul_.Tensor)]
    for node in program.nodes:
        if node.target in in_place:
            later = program.nodes[program.nodes.index(node) + 1 :]
            assert not any(node.args[0] in other.all_input_nodes for other in later)


def test_a_copy_reads_its_source_before_another_write() -> None:
    program = lowered(swap, torch.ones(2), torch.ones(2))
    assert targets(program).count(aten.clone.default) >= 1


def test_stages() -> None:
    program = lowered(swap, torch.ones(2), torch.ones(2))
    assert program.stage == "kernels"
    assert program.history == ("trace", "lower")
    assert lower(program) is program
    with pytest.raises(StageError, match="stage 'pointers'; expected 'aten'"):
        lower(pygraph.indirect(program))


def test_written_inputs_at_every_stage(device: torch.device) -> None:
    program = pygraph.trace(lambda a, b: a[0].add_(b))(torch.ones(2, device=device), torch.ones((), device=device))
    assert written_inputs(program) == {0}
    assert written_inputs(lower(program)) == {0}
