"""Control flow as operations: both branches are right, derivatives too, and eager works as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop  # checked with torch 2.11 and 2.13
from torch.func import grad, vmap

import pygraph
from tests import extent
from tests.steps import assert_one_graph, assert_same

pytestmark = [
    pytest.mark.rotates,
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

BETWEEN = "it is control flow or host code"


def branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def positive(device: torch.device) -> Tensor:
    torch.manual_seed(1)
    return torch.rand(5, 4, device=device) + 0.1


def reasons(fast: Any) -> list[str]:
    return [fallback["reason"] for fallback in fast.explain().to_dict()["fallbacks"]]


def closes_over_a_value(x: Tensor) -> Tensor:
    double = x * 2
    return torch.cond(x.sum() > 0, lambda x: x * double, lambda x: x - double, (x,))


def nested(x: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0,
        lambda x: torch.cond(x.max() > 2, lambda x: x + 1, lambda x: x + 2, (x,)),
        lambda x: x - 1,
        (x,),
    )


def by_autograd(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(branch(leaf).sum(), leaf)[0]


def counted_loop(x: Tensor) -> Tensor:
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 1.5), (count, x))[1]


def loop_on_values(x: Tensor) -> Tensor:
    return while_loop(lambda x: x.abs().sum() < 50, lambda x: (x * 1.5,), (x,))[0]


def running_sum(x: Tensor) -> Any:
    return scan(lambda c, x: (c + x, (c * x).clone()), torch.zeros(4, device=x.device), x)


def backward_scan(x: Tensor) -> Any:
    start = {"sum": torch.zeros(4, device=x.device)}
    return scan(lambda c, x: ({"sum": c["sum"] + x["x"]}, {"y": c["sum"] * x["x"]}), start, {"x": x}, reverse=True)


RUN_BETWEEN_GRAPHS: list[Callable[[Tensor], Any]] = [
    branch, closes_over_a_value, nested, by_autograd, counted_loop, loop_on_values, running_sum, backward_scan,
]  # fmt: skip


@pytest.mark.parametrize("fn", extent.third(RUN_BETWEEN_GRAPHS), ids=lambda fn: fn.__name__)
def test_every_call_takes_its_own_branch(fn: Callable[[Tensor], Any], device: torch.device) -> None:
    """The operation runs between graphs: which branch, or how often, is known to the device only."""
    x = positive(device)
    fast = pygraph.jit(fn)
    for argument in (x, -x, 3 * x, -x, x):
        assert_same(fast(argument), fn(argument), device)
    assert set(reasons(fast)) == {BETWEEN}
    assert fast.cache_info().misses == 1


def cumulative(x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a + b, x, dim=0, combine_mode="generic")


def recurrence(x: Tensor) -> Any:
    return associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x + 1), dim=0, combine_mode="generic")


ASSOCIATIVE: dict[str, Callable[[Tensor], Any]] = {
    "sum": cumulative,
    "recurrence": recurrence,
    "grad": grad(lambda x: cumulative(x).sin().sum()),
    "vmap": vmap(cumulative),
    "vmap(grad)": vmap(grad(lambda x: cumulative(x[:, None]).sin().sum())),
}


@pytest.mark.parametrize("name", ASSOCIATIVE)
def test_an_associative_scan_is_one_graph(name: str, device: torch.device) -> None:
    fn, x = ASSOCIATIVE[name], positive(device)
    fast = pygraph.jit(fn)
    for argument in (x, -x, 3 * x):
        assert_same(fast(argument), fn(argument), device)
    assert_one_graph(fast, 3)


def test_a_live_number_as_predicate_is_baked_in(device: torch.device) -> None:
    x = positive(device)
    fast = pygraph.jit(lambda x, k: torch.cond(k > 1, lambda x: x + 1, lambda x: x - 1, (x,)))
    for k in (2.0, 0.5, 2.0, 0.5):
        assert torch.equal(fast(x, k), x + 1 if k > 1 else x - 1)
    assert fast.cache_info().captures == 2


def test_a_live_number_reaches_a_branch_by_an_operand(device: torch.device) -> None:
    x = positive(device)
    fast = pygraph.jit(lambda x, k: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x * k,)))
    for k in (2.0, 3.0, -4.0):
        assert torch.equal(fast(x, k), x * k + 1)
    assert fast.cache_info().misses == 1


def test_a_live_number_that_a_branch_closes_over(device: torch.device) -> None:
    def fn(x: Tensor, k: float) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * k, lambda x: x - k, (x,))

    x = positive(device)
    fast = pygraph.jit(fn)
    for k in (2.0, 3.0, -4.0):
        assert_same((fast(x, k), fast(-x, k)), (x * k, -x - k), device)


def test_parameters_that_a_branch_reads_stay_live(device: torch.device) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * self.scale, lambda x: x - self.scale, (x,))

    x, net = positive(device), Chooses().to(device).requires_grad_(False)
    fast = pygraph.jit(net)
    for value in (2.0, 3.0):
        net.scale.fill_(value)
        assert_same((fast(x), fast(-x)), (x * value, -x - value), device)
    net.scale = nn.Parameter(torch.full((4,), 5.0, device=device), requires_grad=False)
    assert_same((fast(x), fast(-x)), (x * 5, -x - 5), device)


@pytest.mark.parametrize("fn", [branch, closes_over_a_value], ids=lambda fn: fn.__name__)
def test_branches_under_vmap_are_those_of_eager(fn: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """Torch cannot trace it, so it runs as it is; each row takes its own branch."""
    x = positive(device)
    x[::2] *= -1
    rows = torch.stack([fn(row) for row in x])
    fast = pygraph.jit(vmap(fn))
    for _ in range(3):
        assert_same(fast(x), rows, device)
    assert reasons(fast)


@pytest.mark.parametrize("fn", extent.third([branch, counted_loop, running_sum]), ids=lambda fn: fn.__name__)
def test_eager_works_after_a_trace(fn: Callable[[Tensor], Any], device: torch.device) -> None:
    """Dynamo, which eager asks to compile control flow, gave up for good on what it saw during a trace."""
    x = positive(device)
    for _ in range(2):
        pygraph.trace(fn)(x)
        assert_same(fn(x), fn(x.clone()), device)
        assert_same(fn(-x), fn(-x.clone()), device)


@pytest.mark.slow
def test_many_functions_with_branches(device: torch.device) -> None:
    """More than Dynamo compiles anew of one function."""
    x = positive(device)
    most = 2
    for k in range(most + 2):

        def fn(x: Tensor, k: int = k) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x + k, lambda x: x - k, (x,))

        fast = pygraph.jit(fn)
        with torch._dynamo.config.patch(recompile_limit=most):
            assert_same((fast(x), fast(-x)), (x + k, -x - k), device)
        assert reasons(fast) == [BETWEEN]


def test_operations_in_branches_have_source_lines(device: torch.device) -> None:
    program = pygraph.trace(branch)(positive(device))
    (node,) = [node for node in program.nodes if str(node.target) == "cond"]
    assert node.meta["source"].startswith("test_control_flow.py:")
