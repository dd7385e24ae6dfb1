"""The scopes of the user's on nodes of Programs: of torch's profiler and of NVTX, through all passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.autograd import profiler
from torch.profiler import record_function

import pygraph
from pygraph.calls.engine import Engine
from pygraph.ir.effects import is_work
from pygraph.ir.program import Program
from pygraph.ir.scopes import scopes_of
from pygraph.tracing.user_scopes import open_scopes

PASSES = (pygraph.devicify, pygraph.fuse, pygraph.indirect, pygraph.graphify)


def scoped(x: torch.Tensor, scale: float) -> torch.Tensor:
    with record_function("outer"):
        y = x.sin() * scale
        with profiler.record_function("inner"):
            y.add_(1)
    return y.cos()


@record_function("decorated")
def decorated(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


def scopes(program: Program) -> dict[str, tuple[str, ...]]:
    return {operation(node): scopes_of(node) for node in program.nodes if is_work(node)}


def operation(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0].rstrip("_")


def test_nested_scopes_through_all_passes(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    expected = {"sin": ("outer",), "mul": ("outer",), "add": ("outer", "inner"), "cos": ()}
    program = pygraph.trace(scoped)(x, 0.5)
    assert scopes(program) == expected
    for one in PASSES:
        if device.type == "cuda" and one is pygraph.fuse:
            continue  # tests/gpu/test_profiling.py
        program = one(program)
        found = scopes(program)
        assert {name: found[name] for name in expected} == expected
        assert found.get("pygraph.scalar", ("outer",)) == ("outer",)


def test_a_decorator_and_an_error_in_a_scope(device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            with record_function("failed"):
                raise ValueError
        except ValueError:
            pass
        return decorated(x).neg()

    assert scopes(pygraph.trace(function)(torch.ones(3, device=device))) == {"exp": ("decorated",), "neg": ()}


def test_scopes_that_stay_open(device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        record_function("open").__enter__()
        return x.exp()

    x = torch.ones(3, device=device)
    for _ in range(2):
        assert scopes(pygraph.trace(function)(x)) == {"exp": ("open",)}
        assert open_scopes() == ()
    assert scopes(pygraph.trace(decorated)(x)) == {"exp": ("decorated",)}


def test_results_are_those_of_eager(device: torch.device) -> None:
    fast = pygraph.jit(scoped)
    x = torch.ones(3, device=device)
    for _ in range(3):
        assert torch.equal(fast(x, 0.5), scoped(x, 0.5))
    assert fast.explain().to_dict()["fallbacks"] == []


class Nvtx:
    """The functions of NVTX, which note their calls; a build of torch without CUDA has none."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def rangePushA(self, text: str) -> int:
        self.calls.append(text)
        return len(self.calls)

    def rangePop(self) -> int:
        self.calls.append("pop")
        return len(self.calls)

    def markA(self, text: str) -> None:
        self.calls.append(text)


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Nvtx:
    calls = Nvtx()
    monkeypatch.setattr(torch.cuda.nvtx, "_nvtx", calls)
    return calls


def test_ranges_of_nvtx(device: torch.device, nvtx: Nvtx) -> None:
    push = torch.cuda.nvtx.range_push  # a name of the user's own, as by `from torch.cuda.nvtx import range_push`

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.nvtx.range("range {}", 1):
            y = x.sin()
            with record_function("inner"):
                y = y.exp()
        torch.cuda.nvtx.mark("mark")
        assert push("pushed") == 4
        y = y.neg()
        assert torch.cuda.nvtx.range_pop() == 5
        return y.cos()

    found = scopes(pygraph.trace(function)(torch.ones(3, device=device)))
    assert found == {"sin": ("range 1",), "exp": ("range 1", "inner"), "neg": ("pushed",), "cos": ()}
    assert nvtx.calls == ["range 1", "pop", "mark", "pushed", "pop"]  # as in eager
    assert torch.cuda.nvtx._nvtx is nvtx


def test_ranges_of_other_threads_are_none_of_a_trace(device: torch.device, nvtx: Nvtx) -> None:
    def elsewhere() -> None:
        torch.cuda.nvtx.range_push("elsewhere")

    def function(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x.sin()

    assert scopes(pygraph.trace(function)(torch.ones(3, device=device))) == {"sin": ()}
    assert nvtx.calls == ["elsewhere"]


def programs(engine: Engine) -> Iterator[Program]:
    for one in (engine, *engine.derived()):
        yield from (entry.program for entry in one.cache.entries if entry.program is not None)


def test_a_training_step(device: torch.device) -> None:
    model = torch.nn.Linear(3, 1, bias=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with record_function("forward"):
            loss = model(x).square().sum()
        with record_function("backward"):
            loss.backward()
        optimizer.step()
        return loss

    fast: Any = pygraph.jit(train)
    for _ in range(3):
        fast(torch.ones(4, 3, device=device))
    found = {scopes_of(node) for program in programs(fast.engine) for node in program.nodes if is_work(node)}
    assert found == {("forward",), ("backward",), ("Optimizer.step#SGD.step",)}
