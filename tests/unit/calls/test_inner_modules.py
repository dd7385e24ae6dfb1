"""Modules and functions inside of a function that runs as it is: graphs of their own, with results as in eager."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.calls import limits
from pygraph.process import module_calls
from tests.steps import assert_same

CALLS = 8


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.seen: list[str] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(self.first(x).relu()) * scale


class Reading(nn.Module):
    """What cannot be a graph; the modules inside of it can."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        texts = [str(self.encoder(x, scale=float(scale)).detach()) for scale in (1, 2)]
        return self.head(x), texts


def batch(device: torch.device, seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).to(device)


def pair(device: torch.device, cls: type[nn.Module] = Encoder) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = cls().to(device)
    return module, copy.deepcopy(module)


def test_modules_in_a_statement_that_is_no_graph(device: torch.device) -> None:
    mine, theirs = pair(device, Reading)
    fast = pygraph.jit(mine)
    for seed in range(CALLS):
        x = batch(device, seed)
        (found, texts), (expected, expected_texts) = fast(x), theirs(x)
        assert texts == expected_texts
        assert_same(found, expected, device)
    assert "Encoder: " in str(fast.explain())
    assert fast.cache_info().captures > 0


def test_gradients_and_hooks(device: torch.device) -> None:
    """Gradients go through graphs of modules; hooks of modules run as in eager."""
    found: list[Any] = []
    for module, jitted in zip(pair(device), (True, False), strict=True):
        log: list[Any] = []
        module.register_forward_pre_hook(lambda m, args, log=log: log.append(tuple(args[0].shape)))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(x: Tensor, module: Any = module, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            text = str(loss.detach())
            loss.backward()
            optimizer.step()
            return text

        run = pygraph.jit(step) if jitted else step
        texts = [run(batch(device, seed, 3 + seed % 2)) for seed in range(CALLS)]
        found.append((texts, log, module.state_dict()))
    assert found[0][:2] == found[1][:2]
    assert_same(found[0][2], found[1][2], device)


def test_modes_and_shapes_change(device: torch.device) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x))

    found: list[Any] = []
    for net, jitted in zip(pair(device, Net), (True, False), strict=True):

        def fn(x: Tensor, training: bool, net: Any = net) -> str:
            return str(net.train(training)(x).sum())

        run = pygraph.jit(fn) if jitted else fn
        with torch.no_grad():
            texts = [run(batch(device, seed, 2 + seed % 3), seed % 2 == 0) for seed in range(2 * CALLS)]
        found.append((texts, net.state_dict()))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1], device)


def test_torchs_own_layers_are_left_alone(device: torch.device) -> None:
    layer = nn.Linear(4, 4).to(device)
    fast = pygraph.jit(lambda x: str(layer(x)))
    for seed in range(CALLS):
        fast(batch(device, seed))
    assert fast.cache_info().captures == 0


def test_a_module_that_is_made_in_each_call_is_not_compiled(device: torch.device) -> None:
    made: list[weakref.ref[nn.Module]] = []

    def fn(x: Tensor) -> str:
        module = Encoder().to(x.device)
        made.append(weakref.ref(module))
        return str(module(x).detach())

    fast = pygraph.jit(fn)
    for seed in range(4 * CALLS):
        fast(batch(device, seed))
    assert fast.cache_info().captures == 0
    gc.collect()
    assert sum(one() is not None for one in made) <= limits.LIMITS.wasted_traces + 2  # those that were looked at


def test_what_is_compiled_at_each_call_is_given_up(device: torch.device) -> None:
    """Each call passes another function, so that no call is like another."""
    module, other = pair(device)
    module.forward = other.forward = lambda x, f, m=module: f(m.first(x))
    counts: list[int] = []
    fast = pygraph.jit(lambda x, n: str(module(x, lambda y: y + n)))
    for seed in range(2 * CALLS):
        fast(batch(device, seed), seed)
        counts.append(len(fast.explain_misses().splitlines()))
    assert counts[-1] - counts[CALLS] <= limits.LIMITS.wasted_of_modules


def test_calls_elsewhere_are_torchs(device: torch.device) -> None:
    """The module runs as torch runs it outside of such calls, in other threads, and after an error."""
    module, other = pair(device)
    own = torch.nn.Module._wrapped_call_impl.__code__  # pyright: ignore
    inside, goes_on = threading.Event(), threading.Event()
    seen: list[Any] = []

    def fn(x: Tensor, waits: bool) -> str:
        text = str(module(x).detach())
        if waits:
            inside.set()
            goes_on.wait()
            raise ValueError("on purpose")
        return text

    fast = pygraph.jit(fn)
    x = batch(device, 0)
    for _ in range(CALLS):
        assert fast(x, False) == str(other(x).detach())

    def run() -> None:
        with pytest.raises(ValueError, match="on purpose"):
            fast(x, True)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait()
    hits = fast.cache_info().hits
    seen += [str(module(x).detach()), str(other(x).detach())]
    assert fast.cache_info().hits == hits
    goes_on.set()
    thread.join()
    assert seen[0] == seen[1]
    assert torch.nn.Module._wrapped_call_impl.__code__ is own  # pyright: ignore


def test_the_code_that_is_replaced_is_there() -> None:
    """What `pygraph.process.module_calls` needs of torch."""
    assert torch.nn.Module.__call__ is torch.nn.Module._wrapped_call_impl  # pyright: ignore
    assert not torch.nn.Module._wrapped_call_impl.__code__.co_freevars  # pyright: ignore
    served: list[Any] = []

    class Server:
        def serve(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
            served.append(module)
            return module_calls.call(module, args, kwargs)

    module = nn.Sequential(nn.Linear(2, 2))
    with module_calls.Serving(Server()):
        assert module(torch.ones(2)).shape == (2,)
        assert served == [module]
        with module_calls.Serving(Server(), exempt=module):
            module(torch.ones(2))
    assert served[1:] == [module[0]]  # inside of the one that went its own way


def test_compiled_by_dynamo_meanwhile(device: torch.device) -> None:
    """What Dynamo traces while calls are served is torch's own way, and stays right."""
    module, other = pair(device)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    fast = pygraph.jit(lambda x: str(compiled(x).detach()) + str(module(x).detach()))
    for seed in range(CALLS):
        x = batch(device, seed)
        assert fast(x) == 2 * str(other(x).detach())
    assert_same(compiled(batch(device, 1)), other(batch(device, 1)), device)


class Solver:
    """A loop that its caller only calls."""

    def __init__(self, limit: float) -> None:
        self.limit, self.steps = limit, 0

    def solve(self, x: Tensor) -> Tensor:
        self.steps = 0
        while x.abs().max().item() > self.limit:
            x = x * 0.7 - x.mean() * 0.1
            x = x + x.sin() * 0.01
            self.steps += 1
        return x


def test_a_loop_in_a_function_that_is_called_is_cut_there(device: torch.device) -> None:
    def make() -> Any:
        solver = Solver(0.2)

        def fn(x: Tensor) -> Any:
            with torch.no_grad():
                found = solver.solve(x)
            return found * 2, solver.steps

        return fn

    fast, slow = pygraph.jit(make()), make()
    for seed in range(3 * CALLS):
        x = batch(device, seed) * (1 + seed)
        assert_same(fast(x), slow(x), device)
    assert fast.cache_info().captures > 0, str(fast.explain())
    assert any("test_inner_modules.py" in line for line in fast.explain().to_dict()["in_python"])
