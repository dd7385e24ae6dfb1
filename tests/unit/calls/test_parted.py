"""Functions that are cut into parts: calls, errors and what changes between calls are as in eager."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from pygraph.errors import FallbackError
from pygraph.tracing.function_parts import Body, parts_of
from tests.steps import assert_same


def logging(log: list[Any], scale: float = 2.0) -> Callable[..., Any]:
    """A function that cannot be traced as a whole, as it reads a log in which there is a list."""
    log.append([])

    def fn(x: Tensor, y: Tensor | None = None, *, power: int = 1) -> Any:
        log.append(power)
        z = x * scale if y is None else x * scale + y
        z = z**power
        log.append(z.sum().item())
        if not log or log[-1] > 1e5:
            raise ValueError(f"{log[-1]} is too much")
        return z, power

    return fn


def test_calls_of_all_forms(device: torch.device) -> None:
    mine: list[Any] = []
    theirs: list[Any] = []
    fast, slow = pygraph.jit(logging(mine)), logging(theirs)
    x, y = torch.ones(3, device=device), torch.full((3,), 4.0, device=device)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}), ((x, y), {}), ((x,), {"y": y, "power": 2}), ((), {"x": y}), ((y, x), {"power": 3}), ((x[:2],), {}),
        ((x,), {}), ((y, x), {"power": 3}), ((x, x), {}),
    ]  # fmt: skip
    for args, kwargs in calls * 3:
        assert_same(fast(*args, **kwargs), slow(*args, **kwargs), device)
        assert mine == theirs
    report = fast.explain().to_dict()
    assert {one["reason"] for one in report["fallbacks"]} <= {"it needs a value on the host, to return it"}
    assert "test_parted.py" in report["in_python"][0]
    assert fast.cache_info().hits > 10


def test_errors_are_pythons_own(device: torch.device) -> None:
    log: list[Any] = []
    fast, slow = pygraph.jit(logging(log)), logging([])
    x = torch.ones(3, device=device)
    for _ in range(3):
        fast(x)
    for args, kwargs in (((), {}), ((x, x, x), {}), ((x,), {"colour": 1}), ((x * 1e6,), {})):
        messages: list[str] = []
        for fn in (fast, slow):
            with pytest.raises((TypeError, ValueError)) as error:
                fn(*args, **kwargs)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    with pytest.raises(ValueError, match="too much") as error:
        fast(x * 1e6)
    assert str(error.traceback[-1].path) == __file__
    before = len(log)
    with pytest.raises(RuntimeError):
        fast(x, torch.ones(5, device=device))
    assert len(log) == before + 1  # what comes before the error


def test_a_function_that_is_replaced(device: torch.device) -> None:
    log: list[Any] = []
    fn: Any = logging(log)
    fast = pygraph.jit(fn)
    x = torch.ones(3, device=device)
    for _ in range(4):
        assert fast(x)[1] == 1
    fn.__kwdefaults__ = {"power": 2}
    for _ in range(4):
        assert fast(x)[0].tolist() == [4.0] * 3

    def other(log: list[Any], scale: float) -> Any:
        def fn(x: Tensor, y: Tensor | None = None, *, power: int = 1) -> Any:
            z = x - scale
            log.append("other")
            return z, power

        return fn

    fn.__code__ = other(log, 1.0).__code__
    for _ in range(4):
        assert fast(x)[0].tolist() == [-1.0] * 3
    assert log[-4:] == ["other"] * 4


def test_a_closed_over_variable_is_the_same_in_all_parts(device: torch.device) -> None:
    def make() -> Callable[[Tensor], Tensor]:
        total, calls = 0.0, 0

        def fn(x: Tensor) -> Tensor:
            nonlocal total, calls
            calls += 1
            y = x * calls + total
            total += y.sum().item() / 8
            total = total if total < 10 else total / 3
            return y

        return fn

    fast, slow = pygraph.jit(make()), make()
    x = torch.ones(2, device=device)
    for _ in range(12):
        assert_same(fast(x), slow(x), device)


def test_no_graph_of_autograd_is_cut(device: torch.device) -> None:
    """Where the loss is looked at before its backward, it is read between graphs."""
    net = nn.Linear(3, 2).to(device)

    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        loss = net(x).square().mean()
        if int(loss) > 1e9:
            raise ValueError
        loss.backward()
        return loss.detach()

    fast = pygraph.jit(step)
    for _ in range(4):
        fast(torch.ones(4, 3, device=device))
    report = fast.explain().to_dict()
    assert report["in_python"] == []
    assert "it needs a value on the host" in report["fallbacks"][0]["reason"]
    assert fast.cache_info().captures


def test_an_optimizer_that_decides_on_the_host_runs_after_the_graph(device: torch.device) -> None:
    found: list[Any] = []
    for jitted in (True, False):
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.RAdam(net.parameters(), lr=0.1)

        def step(x: Tensor, net: Any = net, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), x[:, :2])
            loss.backward()
            optimizer.step()
            return loss

        fast = pygraph.jit(step) if jitted else step
        torch.manual_seed(1)
        losses = [fast(torch.randn(4, 3).to(device)).detach().clone() for _ in range(12)]
        found.append((losses, net.state_dict()))
        if jitted:
            report = fast.explain().to_dict()
            assert report["in_python"] == [] or "capturable=True" in report["in_python"][0]
            assert all("begun anew" in fallback["reason"] for fallback in report["fallbacks"])
            assert fast.cache_info().hits >= 8
    assert_same(found[0], found[1], device)


def test_a_scaler_and_a_schedule(device: torch.device) -> None:
    def make() -> tuple[Any, Callable[[], Any]]:
        torch.manual_seed(0)
        net = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), x[:, :2])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            return loss

        return step, lambda: (net.state_dict(), scaler.get_scale(), schedule.last_epoch)

    found: list[Any] = []
    for jitted in (True, False):
        step, state = make()
        fast = pygraph.jit(step) if jitted else step
        torch.manual_seed(1)
        losses = [fast(torch.randn(4, 3).to(device)).detach().clone() for _ in range(16)]
        found.append((losses, *state()))
        if jitted:
            assert fast.explain().to_dict()["fallbacks"] == []
    torch.testing.assert_close(found[0], found[1])


def test_threads_take_turns(device: torch.device) -> None:
    log: list[Any] = []
    fast = pygraph.jit(logging(log))
    x = torch.ones(3, device=device)
    for _ in range(4):
        fast(x, power=2)
    log.clear()
    results: list[Any] = []

    def run() -> None:
        results.extend(fast(x, power=2)[0].tolist() for _ in range(8))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[4.0] * 3] * 24
    assert log.count(2) == log.count(12.0) == 24


def test_strict_calls_are_not_cut(device: torch.device) -> None:
    fast = pygraph.jit(logging([]), strict=True)
    with pytest.raises(FallbackError):
        fast(torch.ones(3, device=device))


def test_the_cache_can_be_cleared_and_the_function_dies(device: torch.device) -> None:
    log: list[Any] = []
    fn = logging(log)
    fast = pygraph.jit(fn)
    x = torch.ones(3, device=device)
    for _ in range(4):
        fast(x)
    fast.cache_clear()
    assert fast.cache_info() == (0, 0, 0, 0, 0)
    for _ in range(4):
        assert fast(x)[0].tolist() == [2.0] * 3
    alive = weakref.ref(fn)
    del fast, fn
    import gc

    gc.collect()
    assert alive() is None


class Reflects:
    """Code that reads all attributes of an object: those without a name count, too."""

    def __init__(self) -> None:
        self.scale, self.calls, self.hidden = 2.0, 0, 1.0

    def everything(self) -> float:
        return sum(value for value in vars(self).values() if isinstance(value, float))

    def step(self, x: Tensor) -> Tensor:
        y = x * self.everything()
        print(y.sum().item() > 1e9)
        return y


def test_attributes_that_are_read_without_a_name(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    del capsys
    reflects = Reflects()
    fast = pygraph.jit(reflects.step)
    x = torch.ones(3, device=device)
    for hidden in (1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 5.0):
        reflects.hidden = hidden
        assert fast(x).tolist() == [2.0 + hidden] * 3


class Matches:
    """A pattern has the names of attributes among the constants."""

    __match_args__ = ("hidden",)

    def step(self, x: Tensor) -> Tensor:
        match self:
            case Matches(number, shown=other):
                y = x * number * other
        print(y.sum().item() > 1e9)
        return y


def test_attributes_that_are_matched(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    del capsys
    matches: Any = Matches()
    matches.hidden, matches.shown = 1.0, 1.0
    fast = pygraph.jit(matches.step)
    x = torch.ones(3, device=device)
    for value in (1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 5.0):
        matches.hidden = value
        assert fast(x).tolist() == [value * matches.shown] * 3
        matches.shown = value


def test_the_report_says_that_it_does_not_count_kernels_of_lines_in_python(device: torch.device) -> None:
    def prints(x: Tensor) -> Tensor:
        y = x * 2
        print(end="")
        z = y.sin().cos()
        return z + 1

    fast = pygraph.jit(prints)
    for _ in range(3):
        fast(torch.ones(3, device=device))
    text = " ".join(str(fast.explain()).split())
    assert "no fallbacks in the graphs; kernels of the lines in Python are not counted above" in text


def test_a_name_of_a_comprehension_that_is_a_variable_too() -> None:
    """Its first part does not give it a value."""

    def fn(items: list[tuple[str, int]]) -> Any:
        some = {k: v + 1 for k, v in items}
        found: list[Any] = []
        for k, v in some.items():
            found.append((k, v))
        return found

    first, second = parts_of(Body.of(fn), [1])
    assert first.function([])([("a", 1)]) == (False, {"some": {"a": 2}})
    assert second.function(["some"])({"a": 2}) == (True, [("a", 2)])


def test_a_decorated_function_with_fewer_arguments_than_its_wrapper_takes(device: torch.device) -> None:
    """A call is bound by the wrapper's own code, whatever ``functools.wraps`` has it say of itself."""

    def checked(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(fn)
        def wrapper(x: Tensor, shift: float = 0.5) -> Tensor:
            log.append(str(x.shape) + str(x.sum().cpu().numpy().ndim))
            y = x * 2 + 1
            return fn(y, shift)

        return wrapper

    def step(x: Tensor, shift: float) -> Tensor:
        return (x + shift).sin() * 3

    log: list[str] = []
    plain = checked(step)
    fast = pygraph.jit(plain)
    for number in range(5):
        x = torch.full((3,), float(number), device=device)
        log.clear()
        torch.testing.assert_close(fast(x), plain(x))
        assert len(log) == 2
    assert fast.cache_info().captures > 0


def test_a_block_that_computes_and_reads_what_it_has_computed(device: torch.device) -> None:
    layer = nn.Linear(4, 4).to(device)

    def measure(x: Tensor) -> Any:
        with torch.no_grad():
            y = layer(x).relu()
            count = (y > 0).sum().item()
        return np.array([count, count + 1]) / 8

    fast = pygraph.jit(measure)
    for number in range(5):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(device)
        assert fast(x).tolist() == measure(x).tolist()
    report = fast.explain().to_dict()
    assert len(report["in_python"]) == 1
    assert not any("ndarray" in one["reason"] for one in report["fallbacks"])
