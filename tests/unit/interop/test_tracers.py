"""Tracers of torch over jitted functions: what they make is what they make of the function itself.

A tracer either keeps the call as a node or inlines it; in both cases what it makes gives the function's results for
other arguments, and ordinary calls afterwards are right and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import pygraph
from tests.unit.interop.common import EXAMPLES, OLD_DYNAMO, Example, arguments, attempt, check_compiled, check_same

pytestmark = pytest.mark.rotates


class Wrapper(nn.Module):
    """A user's function as a module, as `torch.export` wants it."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.fn(x, y)


def _make_fx(**options: Any) -> Callable[..., Any]:
    return lambda fn, *args: make_fx(fn, _allow_non_fake_inputs=True, **options)(*args)


def _export(strict: bool) -> Callable[..., Any]:
    return lambda fn, *args: torch.export.export(Wrapper(fn), args, strict=strict).module()


def _compile(backend: str) -> Callable[..., Any]:
    def trace(fn: Any, *args: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(fn, backend=backend, fullgraph=True)

    return trace


TRACERS: dict[str, Callable[..., Any]] = {
    "make_fx": _make_fx(),
    "make_fx symbolic": _make_fx(tracing_mode="symbolic"),
    "make_fx pre_dispatch": _make_fx(pre_dispatch=True),
    "make_fx of functionalize": lambda fn, *args: make_fx(torch.func.functionalize(fn))(*args),
    "export": _export(strict=False),
    "export strict": _export(strict=True),
    "compile eager": _compile("eager"),
    "compile aot_eager": _compile("aot_eager"),
    "fx": lambda fn, *args: torch.fx.symbolic_trace(fn),
    "fx Interpreter": lambda fn, *args: torch.fx.Interpreter(torch.fx.symbolic_trace(fn)).run,
    "jit.trace": lambda fn, *args: torch.jit.trace(fn, args, check_trace=False),
}


def check_traced(trace: Callable[..., Any], example: Example, device: torch.device) -> None:
    """What a tracer makes of a call of the jitted function does what it makes of a call of the function itself."""
    jitted, fn = example.pair(device)
    args, others = arguments(device, 0), arguments(device, 1)
    got = attempt(lambda: trace(example.user(jitted), *args)(*others))
    expected = attempt(lambda: trace(example.user(fn), *args)(*others))
    if isinstance(expected, type):  # the tracer cannot do it
        assert got is expected
    else:
        check_same(got, expected)
    check_compiled(jitted, lambda: example.user(jitted)(*others), lambda: example.user(fn)(*others))


# torch.export makes a constant of a derivative that is taken inside, of the fake value that it has then.
PAIRS = [
    (tracer, name)
    for tracer in TRACERS
    for name in EXAMPLES
    if not (tracer.startswith("export") and name == "a transform inside")
    and not (OLD_DYNAMO and tracer.startswith(("compile", "export strict")) and name == "a jitted function inside")
]


@pytest.mark.rotates
@pytest.mark.parametrize(("tracer", "name"), PAIRS)
def test_a_tracer_over_a_jitted_function(device: torch.device, tracer: str, name: str) -> None:
    check_traced(TRACERS[tracer], EXAMPLES[name], device)


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_tracer_over_a_jitted_module_on_the_cpu(tracer: str) -> None:
    check_traced(TRACERS[tracer], EXAMPLES["a module"], torch.device("cpu"))


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_tracer_over_a_function_that_is_compiled_already(device: torch.device, tracer: str) -> None:
    example = EXAMPLES["tensors"]
    jitted, fn = example.pair(device)
    args, others = arguments(device, 0), arguments(device, 1)
    with torch.no_grad():
        for _ in range(4):  # so often that calls like these are served natively
            jitted(*args)
        made = TRACERS[tracer](example.user(jitted), *args)
        check_same(made(*others), example.user(fn)(*others))


TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda fn: torch.vmap(fn, (0, None)),
    "vmap in chunks": lambda fn: torch.vmap(fn, (0, None), chunk_size=2),
    "grad": lambda fn: torch.func.grad(lambda x, y: fn(x, y).sum(), argnums=(0, 1)),
    "vmap(grad)": lambda fn: torch.vmap(torch.func.grad(lambda x, y: fn(x, y).sum()), (0, None)),
    "jvp": lambda fn: lambda x, y: torch.func.jvp(fn, (x, y), (x * 2, y + 1)),
    "jacrev": lambda fn: torch.func.jacrev(fn),
    "hessian": lambda fn: torch.func.hessian(lambda x, y: fn(x, y).sum()),
    "functionalize(vmap)": lambda fn: torch.func.functionalize(torch.vmap(fn, (0, None))),
}


@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_over_transforms(device: torch.device, mode: Any, transform: str) -> None:
    jitted, fn = EXAMPLES["tensors"].pair(device)
    args, others = arguments(device, 0), arguments(device, 1)
    for outer in (TRANSFORMED[transform], lambda f: lambda *a: TRANSFORMED[transform](f)(*a)):
        made = make_fx(outer(jitted), tracing_mode=mode, _allow_non_fake_inputs=True)(*args)
        check_same(made(*others), TRANSFORMED[transform](fn)(*others))
    check_compiled(jitted, lambda: jitted(*others), lambda: fn(*others))


@pytest.mark.parametrize("transform", TRANSFORMED)
def test_compile_over_transforms(device: torch.device, transform: str) -> None:
    jitted, fn = EXAMPLES["tensors"].pair(device)
    args = arguments(device, 0)
    got = attempt(lambda: _compile("aot_eager")(TRANSFORMED[transform](jitted))(*args))
    expected = attempt(lambda: _compile("aot_eager")(TRANSFORMED[transform](fn))(*args))
    if isinstance(expected, type):
        assert got is expected
    else:
        check_same(got, expected)
    check_compiled(jitted, lambda: jitted(*args), lambda: fn(*args))


def test_symbolic_shapes_stay_symbolic(device: torch.device) -> None:
    jitted, fn = EXAMPLES["tensors"].pair(device)
    made = make_fx(jitted, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*arguments(device, 0))
    check_same(made(*arguments(device, 1, rows=7)), fn(*arguments(device, 1, rows=7)))


def test_fx_traces_a_function_once() -> None:
    """Twice would be twice the work, and twice every update."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    made = torch.fx.symbolic_trace(lambda x: pygraph.jit(step)(x))
    assert [node.op for node in made.graph.nodes] == ["placeholder", "call_method", "output"]
    assert made(torch.zeros(2)).tolist() == [1, 1]
