"""Threads that compile at once: ours, beside others of ours and beside tracers of torch."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import pygraph
from pygraph.runtime.devices import hold_accumulators
from tests.leftovers import nothing_patched
from tests.unit.runtime.test_threads import run_threads

pytestmark = pytest.mark.rotates


@pytest.fixture(autouse=True)
def busy() -> Generator[None, None, None]:
    """Threads that take turns as often as they can, and a process that they leave as it was."""
    torch._dynamo.reset()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with nothing_patched():
            yield
    finally:
        sys.setswitchinterval(before)
        torch._dynamo.reset()


MODES: tuple[Callable[[], contextlib.AbstractContextManager[Any]], ...] = (
    contextlib.nullcontext,
    torch.no_grad,
    contextlib.nullcontext,
    torch.inference_mode,
)


def in_turn(count: int, work: Callable[[int], None], *shared: nn.Module) -> None:
    """Run ``work`` in so many threads at once, each in a mode of its own, with modules that they share."""
    held = [hold_accumulators([*net.parameters()]) for net in shared]  # AOTAutograd applies Functions to them
    start = threading.Barrier(count)

    def run(index: int) -> None:
        start.wait(60)
        with MODES[index % len(MODES)]():
            work(index)

    run_threads(*(lambda index=index: run(index) for index in range(count)))
    del held


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.relu(self.first(x))) + x)


def gradient(run: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(x).square().sum(), tuple(net.parameters()))


def check(run: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(run(x), net(x))
    if torch.is_grad_enabled():
        for got, expected in zip(gradient(run, net, x), gradient(net, net, x), strict=True):
            torch.testing.assert_close(got, expected)


def test_calls_of_one_compiled_module_after_a_warm_one(device: torch.device) -> None:
    net = nn.Linear(4, 4).to(device)
    x = torch.randn(2, 4, device=device)
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(net, backend=pygraph.backend)
        compiled(x)
        in_turn(4, lambda index, compiled=compiled: check(compiled, net, x), net)
    check(compiled, net, x)


# With the backends of torch's own, too, threads that call one function first crash or get "Detected that you are using
# FX to symbolically trace a dynamo-optimized function".
torch_fails = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11: Dynamo breaks among several threads")


@pytest.mark.parametrize("how", ["jit", pytest.param("compile", marks=torch_fails)])
def test_first_calls_of_one_module(device: torch.device, how: str) -> None:
    net = Net().to(device)
    run: Any = pygraph.jit(net) if how == "jit" else torch.compile(net, backend=pygraph.backend)

    def work(index: int) -> None:
        for size in (2, 3):
            check(run, net, torch.full((size, 4), index / 8, device=device))

    in_turn(8, work, net)


@pytest.mark.parametrize("how", ["jit", pytest.param("compile", marks=torch_fails)])
def test_first_calls_of_many_functions(device: torch.device, how: str) -> None:
    def work(index: int) -> None:
        net = Net().to(device)
        run: Any = pygraph.jit(net) if how == "jit" else torch.compile(net, backend=pygraph.backend)
        check(run, net, torch.full((2, 4), index / 8, device=device))
        check(run, net, torch.full((2, 4), index / 4, device=device))

    in_turn(4, work)


@torch_fails
# Dynamo silences it for the whole process, and so for no thread of several.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_graph_breaks_and_recompilations(device: torch.device) -> None:
    net = Net().to(device)

    def fn(x: Tensor, k: int) -> Tensor:
        y = net(x) * k
        torch._dynamo.graph_break()
        return y.sin() + net.first.bias[:4]

    compiled = torch.compile(fn, backend=pygraph.backend)

    def work(index: int) -> None:
        for k in (1, 2, 3):
            x = torch.full((2, 4), index / 8, device=device)
            torch.testing.assert_close(compiled(x, k), fn(x, k))

    in_turn(4, work, net)


def _plain_make_fx(net: nn.Module) -> None:
    graph = make_fx(lambda x: net(x) * torch.tensor(2).item())(torch.ones(2, 4)).graph
    assert any(node.target is torch.ops.aten.native_layer_norm.default for node in graph.nodes)


def _export(net: nn.Module) -> None:
    program = torch.export.export(net, (torch.ones(2, 4),))
    torch.testing.assert_close(program.module()(torch.ones(2, 4)), net(torch.ones(2, 4)))


def _compile(net: nn.Module) -> None:
    torch.testing.assert_close(torch.compile(net, backend="aot_eager")(torch.ones(2, 4)), net(torch.ones(2, 4)))


@pytest.mark.parametrize("other", [_plain_make_fx, _compile, _export], ids=lambda other: other.__name__.strip("_"))
def test_first_calls_beside_a_tracer_of_torch(device: torch.device, other: Callable[[nn.Module], None]) -> None:
    """One thread traces by torch all the time; torch's tracers replace ``nn.Module.__call__`` for the process."""
    done = threading.Event()

    def beside() -> None:
        try:
            for _ in range(40):
                other(Net())
                if done.is_set():
                    return
        finally:
            done.set()

    def ours() -> None:
        try:
            for index in range(8):
                net = Net().to(device)
                with MODES[index % len(MODES)]():
                    check(pygraph.jit(net), net, torch.full((2, 4), index / 8, device=device))
                if done.is_set():
                    return
        finally:
            done.set()

    run_threads(beside, ours)


LAYERS = nn.Sequential(nn.GELU(), nn.Tanh())


def _compiled(x: Tensor) -> Callable[[], Any]:
    """A first call of what Dynamo has compiled before."""
    from pygraph.interop import live

    compiled = torch.compile(LAYERS, backend=pygraph.backend)
    compiled(x)
    live.reset()
    return lambda: compiled(x)


def _gradient_under_autocast(x: Tensor) -> Any:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return torch.autograd.grad(pygraph.jit(lambda x: (x @ x).exp())(x).sum(), x)


CALLS: dict[str, Callable[[Tensor], Callable[[], Any]]] = {
    "jit": lambda x: lambda: pygraph.jit(LAYERS)(x),
    "compile": _compiled,
    "gradient": lambda x: lambda: torch.autograd.grad(pygraph.jit(lambda x: (x @ x).exp())(x).sum(), x),
    "autocast": lambda x: lambda: _gradient_under_autocast(x),
    "interpreter": lambda x: lambda: pygraph.jit(torch.fx.Interpreter(torch.fx.symbolic_trace(LAYERS)).run)(x),
    "evaluate": lambda x: lambda: pygraph.evaluate(pygraph.indirect(pygraph.trace(torch.sin)(x.detach())), x.detach()),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "interpreter" else n for n in CALLS])
def test_what_fx_notes_for_another_thread(device: torch.device, name: str) -> None:
    """AOTAutograd notes in a variable of the process at which node it is, and checks that it finds it there again."""
    seen: set[int] = set()

    @torch.compiler.disable  # torch 2.11 compiles profile functions
    def look(frame: Any, event: str, arg: Any) -> None:
        seen.add(id(vars(torch.fx.traceback)["current_meta"]))  # that of the process

    call = CALLS[name](torch.ones(3, 3, device=device).requires_grad_())

    def looked_at() -> None:
        sys.setprofile(look)
        try:
            call()
        finally:
            sys.setprofile(None)

    with torch.fx.traceback.preserve_node_meta():
        noted = torch.fx.traceback.current_meta = {"in_grad_fn": 1, "grad_fn_seq_nr": [0]}
        run_threads(looked_at)
        assert seen == {id(noted)}
        assert noted == {"in_grad_fn": 1, "grad_fn_seq_nr": [0]}


def test_what_dies_under_dynamos_lock_waits_for_nobody(device: torch.device) -> None:
    """Dynamo drops compiled code under its lock; a thread that replays may wait for that lock, and has the graphs'."""
    from torch._dynamo.convert_frame import compile_lock

    from pygraph.interop import live

    x = torch.ones(3, device=device)
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend=pygraph.backend)
    compiled(x)
    root = live.pool_owner()
    at_work, let_go = threading.Event(), threading.Event()

    def replays() -> None:
        with root.turn():
            at_work.set()
            let_go.wait(60)
            with compile_lock:
                pass

    def drops() -> None:
        at_work.wait(60)
        with compile_lock:
            let_go.set()
            torch._dynamo.reset()
            gc.collect()

    assert any(function.cache_info().size for one in live.CALLABLES for function in one.functions())
    run_threads(replays, drops, timeout=60)
    again = torch.compile(lambda x: torch.relu(x) + 2, backend=pygraph.backend)
    assert torch.equal(again(x), torch.relu(x) + 2)
    assert not root.shared.releases
