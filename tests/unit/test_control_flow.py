"""Control flow as operations: both branches are right, derivatives too, and eager works as before afterwards."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch._higher_order_ops import associative_scan, scan, while_loop  # checked with torch 2.11 and 2.13
from torch._higher_order_ops.map import map as torch_map
from torch.func import grad, vmap

import pygraph
from pygraph.tracing import unrolled_scans
from tests import extent
from tests.steps import assert_one_graph, assert_same

pytestmark = [
    pytest.mark.rotates,
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo reads it
]

mapped: Any = torch_map  # its annotation says that a body takes a tuple of all further arguments

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


def after_and_before(x: Tensor) -> Tensor:
    """Operands that the graph makes, some of them views, and results that it takes."""
    y = x * 2
    first, second = torch.cond(
        y.mean() > 0, lambda a, b: (a.sin(), b + 1), lambda a, b: (a * 3, b.exp()), ((y + 1)[1:], y.t()[1].expand(3, 5))
    )
    return first @ second.t()[:4] + y[:4].sum()


def loop_in_a_branch(x: Tensor) -> Tensor:
    def often(x: Tensor) -> Tensor:
        return while_loop(lambda x: x.sum() < 100, lambda x: (x * 2 + 1,), (x,))[0]

    return torch.cond(x.sum() > 0, often, lambda x: x - 1, (x,)) * 2


def branch_in_a_loop(x: Tensor) -> Any:
    def turn(i: Tensor, x: Tensor, y: Tensor) -> Any:
        return i + 1, torch.cond(i % 2 == 0, lambda x, y: x + y, lambda x, y: x * 2 - y, (x, y)), x.clone()

    start = torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(lambda i, x, y: (i < 7) & (x.sum() < 1000), turn, (start, x, x + 1))


def no_turn(x: Tensor) -> Any:
    return while_loop(lambda x: x.sum() > 1e9, lambda x: (x + 1,), (x,))


IN_THE_GRAPH: list[Callable[[Tensor], Any]] = [
    branch, closes_over_a_value, nested, by_autograd, counted_loop, loop_on_values, after_and_before, loop_in_a_branch,
    branch_in_a_loop, no_turn,
]  # fmt: skip


@pytest.mark.parametrize("fn", IN_THE_GRAPH, ids=lambda fn: fn.__name__)
def test_every_replay_takes_its_own_branch(fn: Callable[[Tensor], Any], device: torch.device) -> None:
    """Branches and loops are nodes of the graph."""
    x = positive(device)
    fast = pygraph.jit(fn)
    kept: list[tuple[Any, Any]] = []
    for argument in (x, -x, 3 * x, -x, x, x.clone(), -x.clone()):
        kept.append((fast(argument), fn(argument)))
        for mine, theirs in kept:  # those of earlier calls stay as they were
            assert_same(mine, theirs, device)
    assert_one_graph(fast, 7)


def drawn(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x - 1, (x,))


def of_the_host(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + torch.ones(4).to(x.device), lambda x: x - 1, (x,))


@pytest.mark.parametrize("fn", [drawn, of_the_host], ids=lambda fn: fn.__name__)
def test_what_is_no_part_of_a_graph_runs_between_graphs(fn: Callable[[Tensor], Any], device: torch.device) -> None:
    """Numbers are drawn only by the branch that is taken."""
    x = positive(device)
    fast = pygraph.jit(fn)
    for argument in (x, -x, 3 * x, -x, x):
        found = []
        for run in (fast, fn):
            torch.manual_seed(3)
            found.append((run(argument), torch.rand(2, device=device)))
        assert_same(found[0], found[1], device)
    assert any(reason.startswith(BETWEEN) for reason in reasons(fast))


@pytest.mark.parametrize("is_used", [True, False])
def test_draws_behind_a_branch_that_draws(is_used: bool, device: torch.device) -> None:
    """Are made behind it, although no value says so."""

    def fn(x: Tensor) -> Any:
        return (drawn(x) if is_used else drawn(x).shape), torch.rand(3, device=x.device)

    x = positive(device)
    fast = pygraph.jit(fn)
    for argument in (x, -x, x):
        found = []
        for run in (fast, fn):
            torch.manual_seed(3)
            found.append(run(argument))
        assert_same(found[0], found[1], device)


def test_an_index_is_looked_up_only_in_its_branch(device: torch.device) -> None:
    table = positive(device)

    def fn(x: Tensor, at: Tensor) -> Tensor:
        return torch.cond(at.max() < 5, lambda x, at: x + table[at], lambda x, at: x * 2, (x, at))

    x = torch.ones(3, 4, device=device)
    fast = pygraph.jit(fn)
    for at in ([0, 1, 4], [7, 8, 1], [4, 4, 4], [100, 5, 5]):
        index = torch.tensor(at, device=device)
        assert_same(fast(x, index), x + table[index] if max(at) < 5 else x * 2, device)


def test_a_graph_of_a_branch_that_the_first_call_did_not_take(device: torch.device) -> None:
    """Its kernels have never run when it is recorded."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4, device=device)

    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: (x @ weight).softmax(-1), lambda x: x.cumsum(0), (x,))

    for first in (1, -1):
        fast = pygraph.jit(fn)
        x = positive(device) * first
        for sign in (1, 1, -1, -1, 1):
            assert_same(fast(x * sign), fn(x * sign), device)
        assert_one_graph(fast, 5)


def test_eager_works_where_a_trace_has_imported_dynamo() -> None:
    code = """if True:
        import torch, pygraph
        device = pygraph.default_device()
        def fn(x):
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        x = torch.ones(3, device=device)
        fast = pygraph.jit(fn)
        assert [run(y).tolist() for run in (fast, fn) for y in (x, -x)] == [[2] * 3, [-2] * 3] * 2
        assert not fast.explain().to_dict()["fallbacks"]
    """
    subprocess.run([sys.executable, "-c", code], check=True)


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


def running_sum(x: Tensor) -> Any:
    return scan(lambda c, x: (c + x, (c * x).clone()), torch.zeros(4, device=x.device), x)


def backward_scan(x: Tensor) -> Any:
    """From the end, with pytrees, several carried tensors and results, and more of them than steps."""
    start = {"sum": torch.zeros(4, device=x.device), "last": x[0] * 2}

    def step(c: Any, x: Any) -> Any:
        return {"sum": c["sum"] + x["x"], "last": x["y"].sin()}, {"y": c["sum"] * x["x"], "z": c["last"].sum()}

    return scan(step, start, {"x": x, "y": x + 1}, reverse=True)


def along_the_last_dimension(x: Tensor) -> Any:
    """Of slices that do not lie together."""
    return scan(lambda c, x: (c + x, torch.stack([c, x]).view(-1)), x.sum(1), x.exp(), dim=-1)


def closing_over_values(x: Tensor) -> Any:
    """Which the graph makes; the results are used in it."""
    weight, start = x.t() @ x, torch.ones(4, device=x.device)
    last, all_of_them = scan(lambda c, x: (torch.tanh(c @ weight + x), c * weight[0]), start, x * 2)
    return all_of_them[1:] @ weight + last, x + 1


def drawing(x: Tensor) -> Any:
    """At each step; torch 2.11 draws for one more."""
    last, noise = scan(lambda c, x: (c + x * torch.rand_like(x), torch.rand_like(x)), torch.zeros_like(x[0]), x)
    return last, noise, mapped(lambda x: nn.functional.dropout(x, 0.5), x), torch.rand(2, device=x.device)


def updating_what_it_makes(x: Tensor) -> Any:
    def step(c: Tensor, x: Tensor) -> Any:
        made = c * x
        made.add_(1)
        return c + made, made

    return scan(step, torch.zeros(4, device=x.device), x)


def mapped_trees(x: Tensor) -> Any:
    return mapped(lambda a, k: (a[0] * a[1]["b"] + k, {"sum": a[0].sum()}), (x, {"b": x.sin()}), x[0] * 2)


def scans_in_a_map(x: Tensor) -> Any:
    return mapped(lambda row: scan(lambda c, x: (c + x, c * x), row.sum(), row), x)


def branch_in_a_scan(x: Tensor) -> Any:
    def step(c: Tensor, x: Tensor) -> Any:
        return torch.cond(x.sum() > 1.5, lambda c, x: c + x, lambda c, x: c - x, (c, x)), c * x

    return scan(step, torch.zeros(4, device=x.device), x)


def scan_in_a_branch(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: running_sum(x)[1], lambda x: x - 1, (x,))


def gradient_of_a_scan(x: Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    values, _ = closing_over_values(leaf)
    dropped = mapped(lambda x: nn.functional.dropout(x.sin(), 0.5), leaf)
    return torch.autograd.grad(values.sin().sum() + dropped.sum(), leaf)


def number_in_a_scan(x: Tensor) -> Any:
    return scan(lambda c, x: (c + x.sum().item(), c * x), torch.zeros(4, device=x.device), x)


def scan_of_rows(x: Tensor) -> Any:
    return vmap(lambda row: scan(lambda c, x: (c + x, c * x), row[0].clone(), row))(x)


def unchecked(x: Tensor) -> Any:
    """Torch's operation itself, whose body gives what it takes."""
    return torch.ops.higher_order.scan(lambda c, x: (c, x), [x[0] * 2], [x], ())


SCANS: list[Callable[[Tensor], Any]] = [
    running_sum, backward_scan, along_the_last_dimension, closing_over_values, drawing, updating_what_it_makes,
    mapped_trees, scans_in_a_map, branch_in_a_scan, scan_in_a_branch, gradient_of_a_scan,
    scan_of_rows, unchecked,
]  # fmt: skip


NUMBERS_FAIL = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11: Dynamo fails on it in eager")


def assert_as_in_eager(
    fast: Callable[[Tensor], Any], fn: Callable[[Tensor], Any], arguments: Iterable[Tensor], device: torch.device
) -> None:
    """The results, and the numbers that are drawn afterwards."""
    for argument in arguments:
        found = []
        for run in (fast, fn):
            torch.manual_seed(3)
            found.append((run(argument), torch.rand(2, device=device)))
        assert_same(found[0], found[1], device)


@pytest.mark.parametrize("fn", [*SCANS, pytest.param(number_in_a_scan, marks=NUMBERS_FAIL)], ids=lambda fn: fn.__name__)
def test_a_scan_is_unrolled(fn: Callable[[Tensor], Any], device: torch.device) -> None:
    x = positive(device)
    fast = pygraph.jit(fn)
    assert_as_in_eager(fast, fn, (x, -x, 3 * x), device)
    assert_one_graph(fast, 3)


def gives_what_it_takes(x: Tensor) -> Any:
    return scan(lambda c, x: (c + x, x), torch.zeros(4, device=x.device), x)


def updates_what_it_takes(x: Tensor) -> Any:
    return scan(lambda c, x: (c.add_(x), c * x), torch.zeros(4, device=x.device), x)


def carries_another_dtype(x: Tensor) -> Any:
    return scan(lambda c, x: ((c + x).double(), c * x), torch.zeros(4, device=x.device), x)


def decides(x: Tensor) -> Any:
    return scan(lambda c, x: (c + x if x.sum() > 0 else c - x, c * x), torch.zeros(4, device=x.device), x)


REFUSED: dict[Callable[[Tensor], Any], type[Exception]] = {
    gives_what_it_takes: UncapturedHigherOrderOpError,
    updates_what_it_takes: UncapturedHigherOrderOpError,
    carries_another_dtype: UncapturedHigherOrderOpError,
    decides: UncapturedHigherOrderOpError,
    lambda x: running_sum(x[:0]): RuntimeError,
    lambda x: mapped(torch.sin, x[:0]): RuntimeError,
}


@pytest.mark.parametrize("fn", extent.third([*REFUSED]), ids=lambda fn: fn.__name__)
def test_errors_of_a_scan_are_those_of_eager(fn: Callable[[Tensor], Any], device: torch.device) -> None:
    x, texts = positive(device), list[str]()
    for run in (fn, pygraph.jit(fn)):
        with pytest.raises(REFUSED[fn]) as caught:
            run(x)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("fn", [running_sum, drawing, scans_in_a_map], ids=lambda fn: fn.__name__)
def test_a_long_scan_runs_between_graphs(
    fn: Callable[[Tensor], Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unrolled_scans, "MOST_OPERATIONS", 4)
    x = positive(device)
    fast = pygraph.jit(fn)
    assert_as_in_eager(fast, fn, (x, -x, 3 * x), device)
    assert set(reasons(fast)) == {BETWEEN}
    assert fast.cache_info().misses == 1


def test_steps_are_counted_with_those_of_scans_inside(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five scans of four steps, with two operations each at least."""
    x = positive(device)
    operations = len(list(pygraph.trace(scans_in_a_map)(x).nodes))
    for most, unrolled in ((2 * operations, True), (39, False)):
        monkeypatch.setattr(unrolled_scans, "MOST_OPERATIONS", most)
        found = [str(node.target) for node in pygraph.trace(scans_in_a_map)(x).nodes]
        assert ("map_impl" not in found) == unrolled


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
    """Each row takes its own branch."""
    x = positive(device)
    x[::2] *= -1
    fast = pygraph.jit(vmap(fn))
    for argument in (x, -x, x):
        assert_same(fast(argument), torch.stack([fn(row) for row in argument]), device)
    assert_one_graph(fast, 3)


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
        assert reasons(fast) == []


def test_operations_in_branches_have_source_lines(device: torch.device) -> None:
    program = pygraph.trace(branch)(positive(device))
    (node,) = [node for node in program.nodes if str(node.target) == "cond"]
    assert node.meta["source"].startswith("test_control_flow.py:")


def module_in_a_branch(net: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: net(x), lambda x: x * 2 - 1, (x,))


def module_in_a_scan(net: nn.Module, x: Tensor) -> Tensor:
    last, values = scan(lambda c, x: (net(c) * x, c - x), torch.ones(4, device=x.device), x)
    return last + values


@pytest.mark.parametrize("of_a_module", [module_in_a_branch, module_in_a_scan], ids=lambda fn: fn.__name__)
def test_gradients_from_outside_through_a_module(
    of_a_module: Callable[[nn.Module, Tensor], Tensor], device: torch.device
) -> None:
    """Of the branch that is taken; both the forward and the backward are graphs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(device)
    fast, x = pygraph.jit(fn := functools.partial(of_a_module, net)), positive(device)
    for argument in (x, -x, 3 * x, -x, x, x):
        found = []
        for run in (fast, fn):
            leaf = argument.clone().requires_grad_()
            value = run(leaf)
            found.append((value.detach(), torch.autograd.grad(value.sin().sum(), [leaf, *net.parameters()])))
        torch.testing.assert_close(found[0], found[1])
    assert not reasons(fast)
    assert fast.cache_info().captures > 0
