"""graphify: as few regions as dependencies allow, in an order that keeps writes and random draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.ir.effects import count_kernels, is_random, is_view
from pygraph.ir.program import Program
from pygraph.tracing.decisions import deciding
from pygraph.transforms.graphify import refuse

aten = torch.ops.aten

_ON_HOST = (aten._local_scalar_dense.default, torch.ops.pygraph.ask.default)


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(1.0, 7.0, device=device).view(2, 3)


def cut(fn: Callable[..., Any], *args: Any, indirect: bool = True) -> Program:
    program = pygraph.trace(fn)(*args)
    program = pygraph.indirect(program) if indirect else program
    text = str(program)
    result = pygraph.check_program(pygraph.graphify(program))
    assert str(program) == text
    return result


def kinds(program: Program) -> list[str]:
    return [region.kind for region in program.regions]


def test_one_region_if_everything_can_be_recorded(x: torch.Tensor) -> None:
    program = cut(lambda x: (torch.sin(x) @ x.t()).softmax(-1), x)
    assert [(r.kind, r.way, r.reason) for r in program.regions] == [("graph", "patch", None)]
    assert cut(torch.sin, x, indirect=False).regions[0].way == "copy"


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: torch.sin(x)[x > 2], "depends on data"),
        (lambda x: torch.sin(x).nonzero(), "synchronises with the host"),
        (lambda x: torch.sin(x) * x.sum().item(), "it needs a value on the host"),
        (lambda x: torch.sin(x).cpu() + 1, "its result is on the cpu"),
        (lambda x: torch.unique(torch.sin(x)), "synchronises with the host|depends on data"),
    ],
)
def test_what_cannot_be_recorded_has_a_reason_and_a_line(x: torch.Tensor, fn: Callable[..., Any], reason: str) -> None:
    import re

    program = cut(fn, x)
    assert kinds(program)[0] == "graph"
    eager = next(region for region in program.regions if region.kind == "eager")
    assert eager.reason is not None
    assert re.search(reason, eager.reason)
    assert eager.source is not None
    assert eager.source.startswith("test_graphify.py:")
    assert any(f.reason == eager.reason and f.source == eager.source for f in program.fallbacks)


def test_what_does_not_depend_on_a_break_is_not_cut_by_it(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.sin(x)
        rare = a[x > 2]
        b = torch.cos(x)  # could be recorded with the first
        return rare, b * 2

    assert kinds(cut(fn, x)) == ["graph", "eager"]


def test_a_value_from_a_break_needs_a_second_graph(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.sin(x) * x.sum().item())

    program = cut(fn, x)
    assert kinds(program) == ["graph", "eager", "graph"]
    torch.testing.assert_close(pygraph.evaluate(program, x), fn(x))


def order_of(program: Program, choose: Callable[[Any], bool]) -> list[str]:
    return [str(node.meta["source"]) for node in program.nodes if node.op == "call_function" and choose(node)]


def test_random_draws_keep_their_order(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.rand_like(x)
        b = torch.rand_like(x) * x.sum().item()
        c = torch.rand_like(x)
        return a, b, c

    traced = pygraph.trace(fn)(x)
    program = pygraph.graphify(traced)
    assert order_of(program, is_random) == order_of(traced, is_random)
    results = []
    for run in (fn, lambda x: pygraph.evaluate(program, x)):
        torch.manual_seed(0)
        results.append(run(x))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_writes_and_reads_keep_their_order(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x[x > 2]
        x.mul_(2)
        after = x[x > 2]
        x.add_(1)
        return before, after

    program = cut(fn, x.clone())
    mine, eager = x.clone(), x.clone()
    for got, expected in zip(pygraph.evaluate(program, mine), fn(eager), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(mine, eager)


def test_views_are_repeated_in_every_region_that_uses_them(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        view = torch.sin(x).t()
        few = view[view > 0]
        return few, torch.cos(view) * few.sum()

    program = cut(fn, x)
    for node in program.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        for argument in node.all_input_nodes:
            if is_view(argument):
                assert argument.meta["region"] == node.meta["region"]
    for got, expected in zip(pygraph.evaluate(program, x), fn(x), strict=True):
        torch.testing.assert_close(got, expected)


def test_host_arithmetic_has_its_own_region(x: torch.Tensor) -> None:
    program = cut(lambda x, k: (torch.sin(x), k * 2 + 1), x, 3)
    assert "host" in kinds(program)
    assert pygraph.evaluate(program, x, 4)[1] == 9


def test_cpu_programs_say_so() -> None:
    program = pygraph.graphify(pygraph.trace(torch.sin)(torch.ones(2)))
    assert any("on the cpu" in fallback.reason for fallback in program.fallbacks)


def test_refuse_cuts_again(x: torch.Tensor) -> None:
    program = cut(lambda x: torch.exp(torch.cos(torch.sin(x))), x)
    text = str(program)
    node = next(node for node in program.nodes if node.target is aten.cos.default)
    again = pygraph.check_program(refuse(program, [node], "the device refused it"))
    assert str(program) == text
    assert kinds(again) == ["graph", "eager", "graph"]
    assert again.regions[1].reason == "the device refused it"
    torch.testing.assert_close(pygraph.evaluate(again, x), torch.exp(torch.cos(torch.sin(x))))


def test_results_of_one_operation_stay_in_its_region(x: torch.Tensor) -> None:
    """A decision that comes after a draw, and so after its first result, and for which the second need not wait."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = x + 1
        dropped, mask = torch.native_dropout(x, 0.5, True)
        if torch.rand((), device=x.device) > 2:
            dropped = dropped * 2
        return dropped + mask

    with deciding(("True", "False"), None, trusted=True, numbers=False):
        program = pygraph.devicify(pygraph.trace(fn)(x))
    module = program.copy_graph()
    # As where the host draws from a generator of its own, on CUDA: what is read on the host comes last.
    for node in [node for node in module.graph.nodes if node.target in _ON_HOST]:
        module.graph.output_node().prepend(node)
    regions = pygraph.check_program(pygraph.graphify(program.replace(module=module)))
    assert kinds(regions).count("eager") == 2


def test_kernels_counts_device_work(x: torch.Tensor) -> None:
    program = cut(lambda x, k: (torch.sin(x.t()) + x.t(), k + 1), x, 3)
    assert count_kernels(program.nodes) == 2


def test_tensors_on_several_devices_are_reported_and_not_recorded(device: torch.device) -> None:
    """What runs on another device than the one that is captured would run once, and not again in a replay."""
    jitted = pygraph.jit(lambda x: (x * 2, x + 1))
    x = torch.ones(3, device=device)
    program = pygraph.indirect(pygraph.devicify(pygraph.trace(jitted.fn)(x)))
    module = program.copy_graph()
    node = next(node for node in module.graph.nodes if node.target is torch.ops.aten.add.Tensor)
    elsewhere = torch.device(device.type, 1)
    node.meta["spec"] = dataclasses.replace(node.meta["spec"], device=elsewhere)
    regions = pygraph.graphify(program.replace(module=module))
    assert regions.devices == (device, elsewhere)
    assert any("a graph is of one device" in fallback.reason for fallback in regions.fallbacks)
    assert jitted.engine.recorder.record(regions, [x]) is None
    assert program.devices == (device,)
