"""Running statistics of batch norm, updated in place where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph.ir.effects import BACKWARDS_OF_BATCH_NORM
from pygraph.lowering.aten import lower

aten = torch.ops.aten

Normal = Callable[..., torch.Tensor]


def norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, var, training=True)


def once(x: Any, mean: Any, var: Any) -> Any:
    return norm(x, mean, var)


def twice(x: Any, mean: Any, var: Any) -> Any:
    return norm(norm(x, mean, var) * 2, mean, var)


def read_before(x: Any, mean: Any, var: Any) -> Any:
    old = mean * 2
    return norm(x, mean, var) + old.sum()


def read_after(x: Any, mean: Any, var: Any) -> Any:
    y = norm(x, mean, var)
    return y, mean * 2


def old_contents(x: Any, mean: Any, var: Any) -> Any:
    old = mean.clone()
    y = norm(x, mean, var)
    return y, old, mean - old


def between(x: Any, mean: Any, var: Any) -> Any:
    y = norm(x, mean, var)
    middle = mean.clone()
    z = norm(y * 3, mean, var)
    return z, middle, var + middle


def overwritten(x: Any, mean: Any, var: Any) -> Any:
    y = norm(x, mean, var)
    mean.zero_()
    return y


def view(x: Any, mean: Any, var: Any) -> Any:
    part = mean[1:]
    y = norm(x, mean, var)
    return y, part * 2


def on_their_own(x: Any, mean: Any, var: Any) -> Any:
    """Statistics that the function makes itself, by the functional operation: the old ones stay as they are."""
    first, second = mean * 1, var * 1
    new = aten._native_batch_norm_legit_functional(x, None, None, first, second, True, 0.1, 1e-5)
    return new[0], new[3] - first, new[4] - second


def arguments(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, mean, var = torch.randn(4, 3, 5), torch.randn(3), torch.rand(3)
    return [x.to(device), mean.to(device), var.to(device)]


@pytest.mark.parametrize(
    "fn", [once, twice, read_before, read_after, old_contents, between, overwritten, view, on_their_own]
)
def test_lowered_is_eager(fn: Normal, device: torch.device) -> None:
    program = lower(pygraph.trace(fn)(*arguments(device)))
    got, expected = arguments(device), arguments(device)
    torch.testing.assert_close(pygraph.evaluate(program, *got), fn(*expected), rtol=0, atol=0)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("fn", "count"), [(once, 1), (twice, 2), (read_before, 1), (read_after, 1)])
def test_nothing_is_copied(fn: Normal, count: int, device: torch.device) -> None:
    program = lower(pygraph.trace(fn)(*arguments(device)))
    targets = [node.target for node in program.nodes]
    writing = [aten._native_batch_norm_legit.default, aten._batch_norm_with_update.default]
    assert sum(target in writing for target in targets) == count
    assert aten.copy_.default not in targets


def test_statistics_of_the_function_stay_functional(device: torch.device) -> None:
    program = lower(pygraph.trace(on_their_own)(*arguments(device)))
    assert aten._native_batch_norm_legit_functional.default in [node.target for node in program.nodes]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_backward_takes_statistics_where_it_reads_them(training: bool, weighted: bool, device: torch.device) -> None:
    """In training it reads those of the batch; without weights, it chooses its kernels by the dtype of the others."""

    def gradients(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor) -> Any:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        bias = weight if weighted else None
        y = F.batch_norm(x, mean, var, bias, bias, training=training)
        return torch.autograd.grad(y.square().sum(), [x, weight] if weighted else [x])

    def given() -> list[torch.Tensor]:
        return [*arguments(device), torch.tensor([0.5, 2.0, -1.0], device=device)]

    program = pygraph.trace(gradients)(*given())
    backwards = [operation.default for operation in BACKWARDS_OF_BATCH_NORM]
    (backward,) = (node for node in program.nodes if node.target in backwards)
    is_none = [one is None for one in backward.args[3:5]]
    assert is_none == [training and weighted] * 2
    fast, expected = pygraph.jit(gradients), gradients(*given())
    for _ in range(3):
        torch.testing.assert_close(fast(*given()), expected, rtol=0, atol=0)


def test_a_forward_saves_no_running_statistics(device: torch.device) -> None:
    torch.manual_seed(0)
    mine, theirs = (torch.nn.BatchNorm1d(3).to(device) for _ in range(2))
    pygraph.make_graphed_callables(mine, (arguments(device)[0],))
    theirs(arguments(device)[0]).sum().backward()  # as the sample was run
    mine.load_state_dict(theirs.state_dict())
    for _ in range(3):
        for module in (mine, theirs):
            module.zero_grad()
            module(arguments(device)[0]).square().sum().backward()
        torch.testing.assert_close(dict(mine.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    graphed: Any = mine.forward
    entries = graphed.explain().to_dict()["entries"]
    forwards = [entry for entry in entries if str(entry["function"]).startswith("forward")]
    assert [entry["kernels"] for entry in forwards] == [2], "no copies"
