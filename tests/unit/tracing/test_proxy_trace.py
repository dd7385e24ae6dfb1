"""The trace of our own against torch's `make_fx`, and what of torch it rests on."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import activation

import pygraph
from pygraph.tracing.patches import patched
from pygraph.tracing.proxy_trace import proxy_trace, session_here, tracing_here
from tests.leftovers import nothing_patched

LAYER = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU())
CONSTANT = torch.arange(3.0)


def _backward(x: Tensor) -> Any:
    y = x.detach().requires_grad_()
    return torch.autograd.grad((y.sin() @ LAYER[0].weight.T).sum(), y)


def _checkpointed(x: Tensor) -> Any:
    y = x.detach().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(LAYER[0], y, use_reentrant=False)
    return torch.autograd.grad(out.sum(), y)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: (x + CONSTANT, {"a": x.sin()}, 3, None),
    "module": lambda x: LAYER(x),
    "in place": lambda x: x.clone().add_(1).t()[0].mul_(2),
    "backward": _backward,
    "checkpoint": _checkpointed,
    "func": lambda x: torch.func.vmap(torch.func.grad(lambda row: row.prod()))(x),
    "functionalized": torch.func.functionalize(lambda x: x.clone().index_put_((CONSTANT.long(),), x[0])),
    "cond": lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y.cos(), (x,)),
    "random": lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x),
    "nothing": lambda x: x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_writes_down_what_make_fx_does(name: str) -> None:
    function = FUNCTIONS[name]
    graphs: list[str] = []
    ours = patched()(proxy_trace)  # a context manager is a decorator too
    for trace in (ours, lambda f, values: proxy_tensor.make_fx(f, _allow_non_fake_inputs=True)(*values)):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            x = torch.ones(3, 3)
            module = trace(lambda x: function(x), [x])
        nodes = list(module.graph.nodes)
        number = {node: index for index, node in enumerate(nodes)}
        targets = [str(node.target) if node.op == "call_function" else node.op for node in nodes]
        arguments = [(torch.fx.node.map_arg(node.args, number.get), node.kwargs) for node in nodes]
        graphs.append(str([*zip(targets, arguments, strict=True)]))
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_threads_notice_nothing(name: str) -> None:
    """Of a trace in which a function waits in the middle."""
    at_work, looked = threading.Event(), threading.Event()
    seen: dict[str, Any] = {}
    layer = nn.Linear(3, 3).eval()
    compiled = torch.compile(layer, backend="eager")
    compiled(torch.ones(2, 3))
    own = (nn.Module.__call__, nn.Module.__getattr__)

    def look() -> None:
        at_work.wait(60)
        try:
            seen["module"] = (nn.Module.__call__, nn.Module.__getattr__) == own
            seen["flag"] = bool(symbolic_trace._is_fx_tracing_flag) or bool(symbolic_trace.is_fx_symbolic_tracing())
            seen["limit"] = [elements for elements in (0, 1, 2) if elements <= proxy_tensor.CONSTANT_NUMEL_LIMIT]
            seen["tracer"] = proxy_tensor._CURRENT_MAKE_FX_TRACER
            seen["lazy"] = torch.fx._lazy_graph_module._use_lazy_graph_module_flag
            seen["trace"] = tracing_here()
            seen["compiled"] = compiled(torch.ones(2, 3)).shape
            graph = proxy_tensor.make_fx(lambda x: x * torch.tensor(2).item())(torch.ones(3)).graph
            (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
            seen["constant"] = str(product.args[1])
        finally:
            looked.set()

    def waits(x: Tensor) -> Any:
        at_work.set()
        assert looked.wait(60)
        return FUNCTIONS[name](x)

    thread = threading.Thread(target=look, daemon=True)
    with nothing_patched():
        thread.start()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, patched():
            proxy_trace(waits, [torch.ones(3, 3)])
        thread.join(60)
    assert seen == {
        "module": True, "flag": False, "limit": [0, 1], "tracer": None, "lazy": False, "trace": False,
        "compiled": (2, 3), "constant": "2",
    }  # fmt: skip


def test_this_thread_and_autograds_know() -> None:
    """Those of autograd, too, that run a backward for it: on the emulated device they do."""
    device = pygraph.default_device()

    class Noticed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if not (tracing_here() and symbolic_trace._is_fx_tracing_flag):
                raise ValueError("no trace")
            return gradient * 2

    def step(x: Tensor) -> Any:
        y = x.detach().requires_grad_()
        return torch.autograd.grad(Noticed.apply(y).sum(), y)

    pygraph.trace(step)(torch.ones(3, device=device))
    assert session_here() is None


def test_a_compiled_function_inside_is_refused() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    jitted = pygraph.jit(lambda x: compiled(x) * 2)
    x = torch.ones(3, device=pygraph.default_device())
    assert torch.equal(jitted(x), (x + 1) * 2)
    assert "dynamo-optimized" in str(jitted.explain())


def test_what_torch_has() -> None:
    """If this fails, torch has changed what `pygraph.tracing.proxy_trace` and `patches` are made of."""
    tracer = inspect.signature(proxy_tensor._MakefxTracer.__init__).parameters
    assert [*tracer][1:8] == [
        "decomposition_table", "tracing_mode", "_allow_non_fake_inputs", "pre_dispatch", "record_module_stack",
        "_allow_fake_constant", "_error_on_data_dependent_ops",
    ]  # fmt: skip
    for name in ("trace", "trace_subgraph", "_trace_inner", "_init_modes_from_inputs", "_init_modes_from_parent"):
        assert callable(getattr(proxy_tensor._MakefxTracer, name)), name
    assert [*inspect.signature(proxy_tensor.wrap_key).parameters] == ["f", "tensors", "tracer", "pre_dispatch"]
    assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None
    assert "_CURRENT_MAKE_FX_TRACER" in inspect.getsource(torch._higher_order_ops.utils.reenter_make_fx)
    assert "<= CONSTANT_NUMEL_LIMIT" in inspect.getsource(proxy_tensor.proxy_call)
    assert "_is_fx_tracing_flag" in inspect.getsource(symbolic_trace.is_fx_symbolic_tracing)
    assert "torch.overrides.has_torch_function" in inspect.getsource(activation.MultiheadAttention.forward)
    assert "_is_make_fx_tracing()" in inspect.getsource(activation.MultiheadAttention.forward)
