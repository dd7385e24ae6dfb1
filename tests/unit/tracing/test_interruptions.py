"""Handlers of signals, finalizers and functions that look on, in the middle of a trace or of a recording."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph
from pygraph.tracing import interruptions
from tests.fakes import assert_no_fake_left
from tests.leftovers import nothing_patched

pytestmark = pytest.mark.heap

INNER = pygraph.jit(lambda x: x * 3)


class StopError(Exception):
    """What handlers here raise."""


@pytest.fixture(autouse=True)
def alarms() -> Generator[None, None, None]:
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGUSR1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before[0])
    signal.signal(signal.SIGUSR1, before[1])


def steps(x: Tensor) -> Tensor:
    for i in range(12):
        x = torch.relu(x @ x + i).sin()
        x = x + x.view(-1)[:3].sum()
    return x


@pytest.fixture
def swallowed() -> Generator[None, None, None]:
    """Have Python not report what handlers raise inside of a weak reference's callback, where nobody can catch it."""
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, StopError):
            report(unraisable)

    sys.unraisablehook = report_others
    yield
    sys.unraisablehook = report


@pytest.mark.usefixtures("swallowed")
@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_at_any_moment_of_a_first_call(device: torch.device, raises: bool) -> None:
    """It touches tensors and calls a jitted function; the time is that of trace, recording and proof."""
    x = torch.eye(4, device=device)
    expected, seen = steps(x), []
    INNER(x)

    def handler(number: int, frame: object) -> None:
        seen.append(((x + 1).sum().item(), INNER(x).sum().item(), type(x + 1)))
        if raises:
            raise StopError

    signal.signal(signal.SIGALRM, handler)
    pygraph.jit(steps)(x)
    begin = time.perf_counter()
    pygraph.jit(steps)(x)
    whole = time.perf_counter() - begin
    for moment in range(120):
        if moment >= 12 and len(seen) >= 8:  # on a busy machine, some come when the call is over
            break
        jitted = pygraph.jit(steps)
        with nothing_patched():
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + whole * (moment % 12) / 12)
            try:
                assert torch.equal(jitted(x), expected)
            except StopError:
                assert raises
                assert jitted.cache_info().size <= 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert torch.equal(jitted(x), expected)
            assert torch.equal(jitted(x), expected)
        assert jitted.explain().to_dict()["fallbacks"] == []
        assert jitted.engine.shared.lock.acquire(blocking=False)
        jitted.engine.shared.lock.release()
    assert len(seen) >= 8
    assert set(seen) == {(20.0, 12.0, torch.Tensor)}
    assert_no_fake_left()


def test_a_flag_that_a_handler_sets_stays_set(device: torch.device) -> None:
    """The trace puts back what changes of what the function reads, and must not put this back."""
    state = {"stop": False, "signals": 0}

    def handler(number: int, frame: object) -> None:
        state["stop"], state["signals"] = True, state["signals"] + 1

    def fn(x: Tensor) -> Tensor:
        if state["signals"] == 0:
            signal.raise_signal(signal.SIGUSR1)
        return x + (2 if state["stop"] else 1)

    signal.signal(signal.SIGUSR1, handler)
    x = torch.ones(3, device=device)
    jitted = pygraph.jit(fn)
    jitted(x)
    assert state == {"stop": True, "signals": 1}
    assert jitted(x).tolist() == [3.0, 3.0, 3.0]


def test_control_c_stops_a_long_trace_at_once(device: torch.device) -> None:
    begin = time.perf_counter()

    def endless(x: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        while time.perf_counter() - begin < 60:
            x = x + 1
        return x

    x = torch.ones(3, device=device)
    jitted = pygraph.jit(endless)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background, a shell has it ignored
    try:
        with nothing_patched(), pytest.raises(KeyboardInterrupt):
            jitted(x)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.perf_counter() - begin < 30
    assert jitted.cache_info().size == 0
    assert_no_fake_left()


@pytest.mark.parametrize("waits", [lambda: time.sleep(60), lambda: threading.Event().wait(60)], ids=["sleep", "event"])
def test_a_time_limit_ends_a_trace_that_waits(device: torch.device, waits: Callable[[], None]) -> None:
    def limit(number: int, frame: object) -> None:
        raise StopError

    signal.signal(signal.SIGALRM, limit)
    jitted = pygraph.jit(lambda x: (waits(), x + 1)[1])
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    begin = time.perf_counter()
    with nothing_patched(), pytest.raises(StopError):
        jitted(torch.ones(3, device=device))
    assert time.perf_counter() - begin < 30


def test_a_handler_does_not_wait_for_the_trace_of_another_thread(device: torch.device) -> None:
    at_work, let_go = threading.Event(), threading.Event()
    x = torch.ones(3, device=device)

    def slow(x: Tensor) -> Tensor:
        at_work.set()
        assert let_go.wait(60)
        return x + 1

    def stop(number: int, frame: object) -> None:
        let_go.set()
        raise StopError

    thread = threading.Thread(target=lambda: pygraph.trace(slow)(x), daemon=True)
    thread.start()
    assert at_work.wait(60)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(StopError):
        pygraph.trace(lambda x: x * 2)(x)
    thread.join(60)
    assert str(pygraph.trace(lambda x: x * 2)(x)).count("aten.mul") == 1


def test_a_handler_that_returns_has_the_trace_begin_anew(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptions, "PATIENCE", 0.0)
    seen: list[bool] = []
    begun: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(interruptions._current is None))

    def fn(x: Tensor) -> Tensor:
        if not seen:
            try:
                signal.raise_signal(signal.SIGUSR1)
            except BaseException:  # swallows what takes the trace back
                begun.append(1)
        return x + 1 + len(begun)

    x = torch.ones(3, device=device)
    jitted = pygraph.jit(fn)
    assert jitted(x).tolist() == [2.0, 2.0, 2.0]
    assert seen == [True]
    assert begun == []
    assert jitted.explain().to_dict()["fallbacks"] == []


def test_a_handler_set_in_a_trace_stays_and_getsignal_is_the_users_again(device: torch.device) -> None:
    first, second = (lambda number, frame: None), (lambda number, frame: None)
    signal.signal(signal.SIGUSR1, first)
    signal.signal(signal.SIGALRM, first)

    def fn(x: Tensor) -> Tensor:
        signal.signal(signal.SIGUSR1, second)
        return x + 1

    pygraph.trace(fn)(torch.ones(3, device=device))
    assert signal.getsignal(signal.SIGUSR1) is second
    assert signal.getsignal(signal.SIGALRM) is first


def test_several_handlers_run_in_order_though_one_raises(device: torch.device) -> None:
    order: list[str] = []

    def raising(number: int, frame: object) -> None:
        order.append("first")
        raise StopError

    signal.signal(signal.SIGUSR1, raising)
    signal.signal(signal.SIGALRM, lambda number, frame: order.append("second"))

    def fn(x: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGALRM)
        return x + 1

    with nothing_patched(), pytest.raises(StopError) as caught:
        pygraph.trace(fn)(torch.ones(3, device=device))
    assert order == ["first", "second"]
    assert caught.value.__context__ is None


def test_asyncio_gets_its_signals(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    seen: list[float] = []

    def fn(x: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGUSR1)
        return x + 1

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: seen.append((x + 1).sum().item()))
        pygraph.trace(fn)(x)
        await asyncio.sleep(0.05)
        loop.remove_signal_handler(signal.SIGUSR1)

    asyncio.run(main())
    assert seen == [6.0]


# ---- finalizers and functions that look on -----------------------------------------------------------------------


def test_a_collection_inside_the_function_finalizes_outside(device: torch.device) -> None:
    total = torch.zeros(3, device=device)
    seen: list[type] = []

    class Other:
        def __del__(self) -> None:
            seen.append(type(total + 1))
            total.add_(1)

    def garbage() -> weakref.ref[Any]:
        one, other = Other(), Other()
        one.other, other.other = other, one
        return weakref.ref(one, lambda ref: seen.append(type(total * 2)))

    def fn(x: Tensor) -> Tensor:
        gc.collect()
        return x * 2

    x = torch.ones(3, device=device)
    held = garbage()
    trace = pygraph.trace(fn)
    with nothing_patched():
        program = trace(x)
    gc.collect()  # a trace may keep what is older than itself from the collector
    assert held() is None
    assert seen == [torch.Tensor] * 3 or seen == [torch.Tensor] * 2  # whether the callback runs is Python's choice
    assert total.tolist() == [2.0, 2.0, 2.0]
    assert "add" not in str(program)


@pytest.mark.parametrize("how", ["finalizer", "callback"])
def test_an_error_that_python_ignores_is_no_graph_and_printed_once(
    device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)

    class Temporary:
        def __del__(self) -> None:
            if how == "finalizer":
                raise StopError

    def callback(ref: object) -> None:
        raise StopError

    def fn(x: Tensor) -> Tensor:
        temporary = Temporary()
        ref = weakref.ref(temporary, callback if how == "callback" else None)
        del temporary
        return x + (1 if ref() is None else 2)

    x = torch.ones(3, device=device)
    jitted = pygraph.jit(fn)
    for _ in range(2):
        assert torch.equal(jitted(x), x + 1)
        assert capsys.readouterr().err.count("Exception ignored") == 1
    assert "StopError, which Python ignores" in str(jitted.explain().to_dict())


@pytest.mark.parametrize("kind", ["trace", "profile"])
def test_a_function_that_looks_on_sees_real_tensors(device: torch.device, kind: str) -> None:
    a = torch.ones(3, device=device)
    kinds: set[type] = set()
    events: set[str] = set()

    def look(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is watched.__code__:
            kinds.add(type(a + 1))
            kinds.add(type(INNER(a)))
            events.add(event)
            return look
        return None

    def watched(x: Tensor) -> Tensor:
        y = x + 1
        return torch.func.vmap(torch.sin)(y)

    INNER(a)
    get, put = (sys.gettrace, sys.settrace) if kind == "trace" else (sys.getprofile, sys.setprofile)
    before = get()
    put(look)
    try:
        with nothing_patched():
            program = pygraph.trace(watched)(a)
        assert get() is look
    finally:
        put(before)
    assert kinds == {torch.Tensor}
    assert {"call", "return"} <= events
    assert str(program).count("aten.") == 2
