"""``explain(profile=True)``: kernel times by source line, measured beside a call, without a trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import pygraph
from pygraph.calls.profiling import NEXT_CALL
from pygraph.errors import ArgumentError, CaptureError
from pygraph.runtime.devices import driver_for

FILE = "test_profiling.py"


def line_of(function: Callable[..., Any], text: str) -> str:
    """The line of a function that has this text, as reports name it."""
    lines, first = inspect.getsourcelines(function)
    return f"{FILE}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def model(x: torch.Tensor, scale: float) -> torch.Tensor:
    with record_function("outer"):
        y = (x @ x).relu() * scale
        with record_function("inner"):
            y.add_(1)
    return y.sum()


def rows(report: pygraph.Explanation) -> list[dict[str, Any]]:
    """The lines of all kinds of calls that have been measured."""
    profiles = [entry["profile"] for entry in report.to_dict()["entries"]]
    return [row for found in profiles if isinstance(found, dict) for row in found["rows"]]


def test_lines_operations_and_scopes(device: torch.device) -> None:
    fast = pygraph.jit(model)
    x = torch.ones(4, 4, device=device)
    for _ in range(3):
        fast(x, 0.5)
    assert fast.explain().to_dict()["profile"] is None
    assert "profile" not in str(fast.explain())
    assert fast.explain(profile=True).to_dict()["profile"] == NEXT_CALL
    assert "call the function" in str(fast.explain(profile=True))
    assert torch.equal(fast(x, 0.5), model(x, 0.5))
    report = fast.explain(profile=True)
    found = {row["source"]: row for row in report.to_dict()["profile"]["rows"]}
    first, second, third = (line_of(model, text) for text in ("x @ x", "add_", "sum"))
    assert set(found) == {first, second, third}
    assert {one.split(".")[1] for one in found[first]["operations"]} >= {"mm", "relu", "mul"}
    assert found[first]["kernels"] >= 3
    assert found[second]["kernels"] == found[third]["kernels"] == 1
    assert [found[line]["scopes"] for line in (first, second, third)] == [("outer",), ("outer", "inner"), ()]
    assert found[second]["text"] == "y.add_(1)"
    assert all(row["us"] > 0 for row in found.values())
    assert sum(row["share"] for row in found.values()) == pytest.approx(1)
    times = [row["us"] for row in report.to_dict()["profile"]["rows"]]
    assert times == sorted(times, reverse=True)
    assert "y.add_(1)" in str(report)
    assert "outer / inner" in str(report)
    assert fast.explain().to_dict()["profile"] is None


def test_it_is_measured_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_for(device)
    measured: list[int] = []
    inner = type(driver).kernel_times

    def kernel_times(driver: Any, run: Any, restore: Any, count: int) -> Any:
        measured.append(count)
        return inner(driver, run, restore, count)

    monkeypatch.setattr(type(driver), "kernel_times", kernel_times)
    fast = pygraph.jit(model)
    x = torch.ones(4, 4, device=device)
    for _ in range(3):
        fast(x, 0.5)
    fast.explain()
    fast(x, 0.5)
    assert measured == []
    fast.explain(profile=True)
    for _ in range(4):
        fast(x, 0.5)
    fast.explain(profile=True)
    fast(x, 0.5)
    assert len(measured) == 1
    info = fast.cache_info()
    assert (info.hits, info.misses, info.captures) == (8, 1, 1)


class Step:
    """A function that updates what it closes over and its argument, and draws random numbers."""

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros(4, device=device)
        self.x = torch.arange(4.0, device=device)
        self.fast = pygraph.jit(self.run)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x.mul_(2)
        return torch.rand_like(x) + self.count + x


def test_it_leaves_no_trace(device: torch.device) -> None:
    profiled, plain = Step(device), Step(device)
    for step in (profiled, plain):
        torch.manual_seed(3)
        for _ in range(3):
            step.fast(step.x)
        if step is profiled:
            step.fast.explain(profile=True)
        step.results = [step.fast(step.x) for _ in range(2)]
    assert rows(profiled.fast.explain(profile=True))
    for one, other in zip(profiled.results, plain.results, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(profiled.x, plain.x)
    assert torch.equal(profiled.count, plain.count)
    assert profiled.x._version == plain.x._version
    assert profiled.fast.explain().to_dict()["fallbacks"] == []


def test_parts_outside_of_graphs(device: torch.device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y = y[y.nonzero()[:, 0]]
        return y.cos()

    fast = pygraph.jit(function)
    x = torch.ones(4, device=device)
    for _ in range(3):
        fast(x)
    fast.explain(profile=True)
    fast(x)
    found = {row["source"] for row in rows(fast.explain(profile=True))}
    assert found == {line_of(test_parts_outside_of_graphs, text) for text in ("x.sin()", "nonzero()", "y.cos()")}


def test_kinds_of_calls_and_derived_functions(device: torch.device) -> None:
    fast = pygraph.jit(model)
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    for size in (4, 4, 4, 6, 6, 6):
        fast(torch.ones(size, size, device=device), 0.5)
    for _ in range(3):
        fast(weight, 0.5).backward()
    fast.explain(profile=True)
    fast(torch.ones(4, 4, device=device), 0.5)
    fast(weight, 0.5).backward()
    found = [(entry["function"], entry["profile"]) for entry in fast.explain(profile=True).to_dict()["entries"]]
    names = [name for name, one in found if isinstance(one, dict)]
    assert names == [None, "forward(model)", "backward(model)"]
    assert [name for name, one in found if one == NEXT_CALL] == [None]


def test_backwards_are_those_of_lines(device: torch.device) -> None:
    weight = torch.ones(4, 4, device=device, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        z = y.exp()
        return z.sum()

    def train(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        loss = forward(x)
        loss.backward()
        return loss

    x = torch.ones(4, 4, device=device)
    products, exponentials, sums = (line_of(forward, text) for text in ("x @ weight", "y.exp()", "z.sum()"))
    step, loss = pygraph.jit(train), pygraph.jit(forward)
    kinds: list[tuple[Any, Callable[[], Any]]] = [(step, lambda: step(x)), (loss, lambda: loss(x).backward())]
    for function, call in kinds:
        for _ in range(4):
            call()
        function.explain(profile=True)
        call()
        found = rows(function.explain(profile=True))
        backward = {row["source"]: row for row in found if row["is_backward"]}
        assert set(backward) == {products, exponentials}
        assert {row["source"] for row in found if not row["is_backward"]} >= {products, exponentials, sums}
        assert any("mm" in name for name in backward[products]["operations"])
        assert [name.split(".")[1] for name in backward[exponentials]["operations"]] == ["mul"]


def test_derivatives_of_derivatives_have_the_line_that_asks(device: torch.device) -> None:
    def penalty(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return second

    fast = pygraph.jit(penalty)
    x = torch.ones(4, device=device)
    for _ in range(3):
        fast(x)
    fast.explain(profile=True)
    assert torch.equal(fast(x), penalty(x))
    found = rows(fast.explain(profile=True))
    asks = {line_of(penalty, text) for text in ("create_graph", "(second,) =")}
    assert {row["source"] for row in found} <= asks
    assert not any(row["is_backward"] for row in found)


def test_modules_methods_and_compiled_functions(device: torch.device) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

        @pygraph.jit
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    layer, x = Layer().to(device).requires_grad_(False), torch.ones(2, 4, device=device)
    fast = pygraph.jit(layer)
    compiled = pygraph.jit(model).lower(torch.ones(4, 4, device=device), 0.5).compile()
    calls: list[tuple[Any, Callable[[], Any]]] = [
        (fast, lambda: fast(x)),
        (layer.method, lambda: layer.method(x)),
        (compiled, lambda: compiled(torch.ones(4, 4, device=device), 0.5)),
    ]
    for explained, call in calls:
        call(), call(), explained.explain(profile=True), call()
        assert rows(explained.explain(profile=True))


def test_torch_compile(device: torch.device, fresh_dynamo: None) -> None:
    del fresh_dynamo

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin()

    compiled = torch.compile(function, backend=pygraph.backend, options={"fuse": False})
    x = torch.ones(4, device=device)
    for _ in range(3):
        compiled(x)
    pygraph.explain(profile=True)
    compiled(x)
    found = rows(pygraph.explain(profile=True))
    assert [row["source"] for row in found] == [line_of(test_torch_compile, "(x * 2).sin()")]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so of any profile
def test_it_waits_while_another_profiler_is_at_work(device: torch.device) -> None:
    fast = pygraph.jit(model)
    x = torch.ones(4, 4, device=device)
    for _ in range(3):
        fast(x, 0.5)
    fast.explain(profile=True)
    with profile(activities=[ProfilerActivity.CPU]):
        for _ in range(3):
            assert torch.equal(fast(x, 0.5), model(x, 0.5))
    assert fast.explain(profile=True).to_dict()["profile"] == NEXT_CALL
    (entry,) = fast.engine.cache.entries
    assert entry.plans == 0  # a plan would serve the call that is to be measured
    fast(x, 0.5)
    assert rows(fast.explain(profile=True))


@pytest.mark.parametrize("options", [{"reuse_outputs": True}, {"donate_argnums": 0}, {"strict": True}, {"fuse": True}])
def test_options(device: torch.device, options: dict[str, Any]) -> None:
    options = {**options, "mode": "replay"}
    if device.type != "cuda":
        options.pop("fuse", None)  # there is nothing to fuse for

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().mul(2) + 1

    fast = pygraph.jit(function, **options)
    for number in range(5):
        if number == 3:
            fast.explain(profile=True)
        x = torch.full((4,), float(number), device=device)
        expected = function(x)
        torch.testing.assert_close(fast(x), expected)
    assert len(rows(fast.explain(profile=True))) == 1


@pytest.mark.parametrize("kind", [RuntimeError, CaptureError, torch.OutOfMemoryError])
def test_a_measurement_that_fails_is_told(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    fast = pygraph.jit(model)
    x = torch.ones(4, 4, device=device)
    for _ in range(3):
        fast(x, 0.5)
    fast.explain(profile=True)

    def kernel_times(*args: Any) -> Any:
        raise kind("the profiler is taken")

    with monkeypatch.context() as patch:
        patch.setattr(type(driver_for(device)), "kernel_times", kernel_times)
        assert torch.equal(fast(x, 0.5), model(x, 0.5))
    report = fast.explain(profile=True)
    assert report.to_dict()["profile"] == "it could not be measured: the profiler is taken"
    assert "the profiler is taken" in str(report)
    fast(x, 0.5)  # which tries once more
    assert rows(fast.explain(profile=True))


def test_before_any_call(device: torch.device) -> None:
    fast = pygraph.jit(model)
    assert fast.explain(profile=True).to_dict()["profile"] is None


def test_calls_without_a_graph_have_none(device: torch.device) -> None:
    fast = pygraph.jit(model, mode="launch")
    x = torch.ones(4, 4, device=device)
    for _ in range(2):
        fast(x, 0.5)
    found = fast.explain(profile=True).to_dict()["profile"]
    assert isinstance(found, str)
    assert "torch.profiler" in found


class Owner:
    """An object with a transformed method."""

    @pygraph.jit
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("profile", ["yes", "no", 1, 0, None])
def test_whether_to_measure_is_true_or_false(device: torch.device, profile: Any) -> None:
    """A text would be true, whatever it says."""
    fast, x = pygraph.jit(model), torch.ones(4, 4, device=device)
    module = pygraph.jit(torch.nn.Linear(4, 4).to(device))
    compiled = fast.lower(x, 0.5).compile()
    told = {"model": fast, "Linear": module, "Owner.method": Owner().method, "compiled": compiled, "pygraph": pygraph}
    for one in told.values():
        with pytest.raises(ArgumentError, match=rf"explain\(…\): profile={profile!r}; expected True or False"):
            one.explain(profile=profile)  # type: ignore[attr-defined]
    fast(x, 0.5)
    assert fast.explain().to_dict()["profile"] is None
