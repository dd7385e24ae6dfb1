"""`torch.export`, `torch.fx` and `torch.jit.trace` over modules with jitted parts: state keeps its names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.api.module import TransformedModule
from tests.unit.interop.common import OLD_DYNAMO, arguments, check_compiled, check_same


class Model(nn.Module):
    """A module whose forward calls a jitted function and a jitted submodule."""

    def __init__(self, jit: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = jit(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        self.norm = nn.LayerNorm(4)
        self.activate = jit(torch.tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activate(self.norm(self.part(x)))


def models(device: torch.device) -> tuple[Any, Any]:
    mine, reference = Model(pygraph.jit).to(device).eval(), Model(lambda fn: fn).to(device).eval()
    return mine, reference


def check_afterwards(mine: Any, reference: Any, x: torch.Tensor) -> None:
    check_same(mine(x), reference(x))
    check_compiled(mine.part, lambda: mine.part(x), lambda: reference.part(x))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.skipif(OLD_DYNAMO, reason="torch 2.11: transformed functions that are attributes are not found")
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_export(device: torch.device, strict: bool, dynamic: bool) -> None:
    mine, reference = models(device)
    shapes = ({0: torch.export.Dim("rows")},) if dynamic else None
    exported = torch.export.export(mine, (arguments(device, 0)[0],), dynamic_shapes=shapes, strict=strict)
    assert list(exported.state_dict) == list(reference.state_dict())
    assert list(exported.graph_signature.parameters) == [name for name, _ in reference.named_parameters()]
    x = arguments(device, 1, rows=6 if dynamic else 3)[0]
    check_same(exported.module()(x), reference(x))
    check_afterwards(mine, reference, x)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_export_of_a_jitted_module(device: torch.device, strict: bool) -> None:
    _, reference = models(device)
    exported = torch.export.export(pygraph.jit(reference), (arguments(device, 0)[0],), strict=strict)
    assert list(exported.state_dict) == list(reference.state_dict())
    x = arguments(device, 1)[0]
    check_same(exported.module()(x), reference(x))


class Decorated(nn.Module):
    """A module whose forward is a transformed method."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    @pygraph.jit
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def with_forward(model: Any) -> Any:
    model.forward = pygraph.jit(model.forward)
    return model


FORWARDS: dict[str, Callable[[], Any]] = {
    "decorated": Decorated,
    "set": lambda: with_forward(nn.Linear(4, 4)),
    "of a part": lambda: nn.Sequential(with_forward(nn.Linear(4, 4)), nn.ReLU()),
}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.skipif(OLD_DYNAMO, reason="torch 2.11: transformed functions that are attributes are not found")
@pytest.mark.parametrize("kind", FORWARDS)
def test_export_of_a_module_with_a_jitted_forward(device: torch.device, kind: str, strict: bool) -> None:
    module = FORWARDS[kind]().to(device)
    x, other = arguments(device, 0)[0], arguments(device, 1)[0]
    wanted = module(x)
    exported = torch.export.export(module, (other,), strict=strict)
    assert list(exported.graph_signature.parameters) == [name for name, _ in module.named_parameters()]
    check_same(exported.module()(x), wanted)
    check_same(module(x), wanted)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("backend", ["eager", pygraph.backend], ids=["eager", "pygraph"])
def test_export_of_a_jitted_module_that_is_compiled(device: torch.device, backend: Any, strict: bool) -> None:
    """``compile()`` of a module compiles its calls, and those of the jitted one call them."""
    _, reference = models(device)
    fast, x = pygraph.jit(reference), arguments(device, 1)[0]
    wanted = reference(x)
    fast.compile(backend=backend)
    check_same(fast(x), wanted)
    check_same(reference(x), wanted)
    exported = torch.export.export(fast, (arguments(device, 0)[0],), strict=strict)
    assert list(exported.state_dict) == list(reference.state_dict())
    check_same(exported.module()(x), wanted)


def test_a_jitted_exported_module(device: torch.device) -> None:
    mine, reference = models(device)
    fast = pygraph.jit(torch.export.export(mine, (arguments(device, 0)[0],)).module())
    x = arguments(device, 1)[0]
    check_compiled(fast, lambda: fast(x), lambda: reference(x))


def test_fx_keeps_the_modules_below_a_jitted_one(device: torch.device) -> None:
    mine, reference = models(device)
    traced = torch.fx.symbolic_trace(mine)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert targets == ["part.0", "part.1", "norm"]
    x = arguments(device, 1)[0]
    check_same(traced(x), reference(x))
    check_afterwards(mine, reference, x)


def test_fx_keeps_a_jitted_module_as_a_node_when_asked(device: torch.device) -> None:
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, TransformedModule) or super().is_leaf_module(m, module_qualified_name)

    mine, reference = models(device)
    traced = torch.fx.GraphModule(mine, Tracer().trace(mine))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["part", "norm"]
    x = arguments(device, 1)[0]
    check_same(traced(x), reference(x))
    assert traced.part is mine.part
    check_afterwards(mine, reference, x)


def test_fx_runs_the_hooks_of_a_jitted_module_once() -> None:
    mine, _ = models(torch.device("cpu"))
    mine.part.register_forward_hook(lambda module, args, result: result * 10)
    traced = torch.fx.symbolic_trace(mine)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"].count(torch.tanh) == 1
    x = arguments(torch.device("cpu"), 1)[0]
    check_same(traced(x), torch.tanh(mine.norm(mine.part(x))))


def test_a_jitted_fx_module(device: torch.device) -> None:
    _, reference = models(device)
    fast = pygraph.jit(torch.fx.symbolic_trace(reference))
    x = arguments(device, 1)[0]
    check_compiled(fast, lambda: fast(x), lambda: reference(x))


def test_jit_trace(device: torch.device) -> None:
    mine, reference = models(device)
    x = arguments(device, 1)[0]
    for model in (mine, mine.part):
        traced = torch.jit.trace(model, (arguments(device, 0)[0],))
        check_same(traced(x), model(x))
    check_afterwards(mine, reference, x)


def test_a_jitted_scripted_module_runs_as_it_is(device: torch.device) -> None:
    """Its training flag and its tensors are TorchScript's, so that a change of them would be missed."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))).to(device).eval()
    for fast in (pygraph.jit(scripted), pygraph.jit(lambda x: scripted(x))):
        with torch.no_grad():
            for seed in range(4):
                x = arguments(device, seed)[0]
                scripted.train(seed > 2)
                torch.manual_seed(0)
                expected = scripted(x)
                torch.manual_seed(0)
                check_same(fast(x), expected)
        assert "modules whose state lies in Python objects" in str(fast.explain())
