"""`torch.compile` over jitted functions: no graph break, Dynamo's own guards, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from tests.unit.interop.common import OLD_DYNAMO, TRANSFORMS, arguments, check_compiled, check_same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Counting:
    """A backend that keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sin() + x.mean()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform_is_one_graph(device: torch.device, transform: str) -> None:
    backend = Counting()
    function = TRANSFORMS[transform](plain)
    compiled = torch.compile(lambda x, y: function(x, y) * 2 + function(y, x), backend=backend, fullgraph=True)
    for seed in range(3):
        x, y = arguments(device, seed)
        check_same(compiled(x, y), plain(x, y) * 2 + plain(y, x))
    assert len(backend.graphs) == 1
    check_compiled(function, lambda: function(x, y), lambda: plain(x, y))


def test_the_jitted_function_itself(device: torch.device) -> None:
    backend = Counting()
    function = pygraph.jit(plain)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    check_same(compiled(*arguments(device, 0)), plain(*arguments(device, 0)))
    assert len(backend.graphs) == 1


def test_a_call_that_was_served_natively_before(device: torch.device) -> None:
    function = pygraph.jit(plain)
    args = arguments(device, 0)
    with torch.no_grad():
        for _ in range(4):
            function(*args)
        compiled = torch.compile(lambda x, y: function(x, y) + 1, backend="aot_eager", fullgraph=True)
        check_same(compiled(*args), plain(*args) + 1)


def test_what_the_function_reads_is_guarded(device: torch.device) -> None:
    settings = {"scale": 2.0}
    weight = torch.ones(4, device=device)
    function = pygraph.jit(lambda x: x * settings["scale"] + weight)
    compiled = torch.compile(lambda x: function(x) - 1, backend="eager", fullgraph=True)
    x = torch.ones(4, device=device)
    assert compiled(x).tolist() == [2] * 4
    settings["scale"] = 3.0
    assert compiled(x).tolist() == [3] * 4
    weight.mul_(2)
    assert compiled(x).tolist() == [4] * 4


def test_dynamic_shapes(device: torch.device) -> None:
    backend = Counting()
    function = pygraph.jit(plain)
    compiled = torch.compile(lambda x, y: function(x, y), backend=backend, fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        check_same(compiled(*arguments(device, rows, rows)), plain(*arguments(device, rows, rows)))
    assert len(backend.graphs) == 1


def test_a_keyword_call_with_numbers_and_defaults(device: torch.device) -> None:
    fn = lambda x, *, k=2.0, n=1, flag=True: x * k + n if flag else x  # noqa: E731
    function = pygraph.jit(fn, static_argnames="flag")
    compiled = torch.compile(lambda x, k: (function(x), function(x, k=k), function(x, flag=False)), fullgraph=True,
                             backend="eager")  # fmt: skip
    x = torch.ones(3, device=device)
    for k in (0.5, 3.0, 4.0):
        check_same(compiled(x, k), (fn(x), fn(x, k=k), fn(x, flag=False)))


def test_donated_arguments_are_not_consumed(device: torch.device) -> None:
    function = pygraph.jit(lambda x: x * 2, donate_argnums=0)
    compiled = torch.compile(lambda x: function(x) + x, backend="eager", fullgraph=True)
    x = torch.ones(3, device=device)
    assert compiled(x).tolist() == [3, 3, 3]
    assert x.tolist() == [1, 1, 1]


class Model(nn.Module):
    """Jitted parts of every kind: a submodule, a method, a function over a parameter."""

    def __init__(self, jit: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = jit(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()))
        self.scale = nn.Parameter(torch.ones(4))
        self.outer = jit(lambda x: x * self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.part(x)) + self.method(x)

    @pygraph.jit
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.scale.diag()


@pytest.mark.skipif(OLD_DYNAMO, reason="torch 2.11: transformed functions that are attributes are not found")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_with_jitted_parts(device: torch.device, backend: str, training: bool) -> None:
    mine, reference = (Model(jit).to(device).train(training) for jit in (pygraph.jit, lambda fn: fn))
    compiled = torch.compile(mine, backend=backend, fullgraph=True)
    for seed in range(2):
        x = arguments(device, seed)[0].requires_grad_()
        z = x.detach().clone().requires_grad_()
        out, expected = compiled(x), reference(z)
        check_same(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        check_same(x.grad, z.grad)
    for (name, p), (other, q) in zip(mine.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other
        check_same((p, p.grad), (q, q.grad))
    check_same(dict(mine.named_buffers()), dict(reference.named_buffers()))
    with torch.no_grad():
        check_same(mine.eval()(x), reference.eval()(z))


def test_a_jitted_module_itself(device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    fast = pygraph.jit(model)
    for compiled in (torch.compile(fast, backend="eager", fullgraph=True),):
        x = arguments(device, 0)[0]
        check_same(compiled(x), model(x))
        assert [name for name, _ in compiled.named_parameters()] == ["_orig_mod.weight", "_orig_mod.bias"]
    with torch.no_grad():
        model.weight.mul_(2)
        check_same(compiled(x), model(x))
    check_compiled(fast, lambda: fast(x), lambda: model(x))


def test_a_compiled_function_inside_a_jitted_one(device: torch.device) -> None:
    """A trace goes through a compiled function, which runs as it is there."""
    inner = torch.compile(plain, backend="eager")
    function = pygraph.jit(lambda x, y: inner(x, y) * 2)
    with torch.no_grad():
        for seed in range(3):
            x, y = arguments(device, seed)
            check_same(function(x, y), plain(x, y) * 2)


def test_two_levels_of_jit_and_an_outer_loop(device: torch.device) -> None:
    inner = pygraph.jit(plain)
    outer = pygraph.jit(lambda x, y: inner(x, y) * inner(y, x))

    def loop(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = outer(x, y)
        return x

    x, y = arguments(device, 0)
    expected = x
    for _ in range(3):
        expected = plain(expected, y) * plain(y, expected)
    check_same(torch.compile(loop, backend="aot_eager", fullgraph=True)(x, y), expected)
    with torch.no_grad():
        check_same(loop(x, y), expected)
