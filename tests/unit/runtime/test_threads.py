"""Calls from several threads, calls inside calls, and calls in forked and spawned processes."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.calls.keys import Keys
from pygraph.errors import FallbackError
from pygraph.process.reentrancy import INSIDE_CALL, here
from pygraph.runtime.pointers import Patcher
from tests import extent

ROOT = Path(pygraph.__file__).parent.parent


def run_threads(*works: Callable[[], None], timeout: float = 240) -> None:
    """Run every function in a thread of its own; raises the first exception, and if one does not come to an end."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "a thread does not come to an end"
    if errors:
        raise errors[0]


# ---- threads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_graphs", [1, 2, 64])
def test_threads_with_shapes_values_and_evictions(device: torch.device, max_graphs: int) -> None:
    fn = lambda x, k: (torch.relu(x * k).sum(-1), x + k)  # noqa: E731
    jitted = pygraph.jit(fn, max_graphs=max_graphs)

    def work(seed: int) -> Callable[[], None]:
        def run() -> None:
            draw = random.Random(seed)
            held = []
            for _ in range(25):
                x = torch.full((draw.randint(1, 4), 3), draw.uniform(-2, 2), device=device)
                k = draw.choice((2, 3, 0.5, -1.5))
                held.append((jitted(x, k), fn(x, k)))
            for got, expected in held:
                for a, b in zip(got, expected, strict=True):
                    assert torch.equal(a, b)

        return run

    run_threads(*map(work, range(4)))
    assert jitted.cache_info().size <= max_graphs


def test_threads_with_a_number_that_decides(device: torch.device) -> None:
    """Its values become part of the key only when a first trace has shown that they must."""
    for round_number in range(8):
        fn = lambda x, k: x * 2 if k > 1 else x + k  # noqa: E731
        jitted = pygraph.jit(fn)
        start = threading.Barrier(4)

        def work(k: int, jitted: Any = jitted, fn: Any = fn, start: Any = start) -> None:
            x = torch.full((3,), float(k), device=device)
            start.wait(60)
            for _ in range(3):
                assert torch.equal(jitted(x, k), fn(x, k))

        run_threads(*(lambda k=k: work(k) for k in range(round_number % 3, round_number % 3 + 4)))


def test_a_key_from_before_another_thread_learnt_more(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that wait for their turn have keys that say too little when it comes."""
    fn = lambda x, k: x * 2 if k > 1 else x + k  # noqa: E731
    jitted = pygraph.jit(fn)
    x = torch.full((3,), 3.0, device=device)
    jitted(x, 5)
    make = Keys.of
    fresh = False

    def stale(self: Any, *args: Any) -> Any:
        nonlocal fresh
        key = make(self, *args)
        fresh, first = True, not fresh
        return key._replace(numbers=()) if first else key

    monkeypatch.setattr(Keys, "of", stale)
    for k in (0, 7, 1, 0, 3):
        fresh = False
        assert torch.equal(jitted(x, k), fn(x, k)), k


def test_threads_with_clearing_looking_and_a_parameter_that_changes(device: torch.device) -> None:
    world = {"weight": torch.ones(3, device=device), "scale": 1.0}
    fn = lambda x: x * world["weight"] * world["scale"]  # noqa: E731
    jitted = pygraph.jit(fn, max_graphs=2)
    lock, done = threading.Lock(), threading.Event()
    callers = 3

    def call(seed: int) -> Callable[[], None]:
        def run() -> None:
            draw = random.Random(seed)
            for _ in range(20):
                x = torch.full((draw.randint(1, 3), 3), draw.uniform(1, 2), device=device)
                with lock:
                    got, expected = jitted(x), fn(x)
                assert torch.equal(got, expected)

        return run

    def change() -> None:
        draw = random.Random(9)
        while not done.wait(0.002):
            with lock:
                value = draw.uniform(1, 2)
                match draw.randint(0, 3):
                    case 0:
                        world["weight"].fill_(value)
                    case 1:
                        world["weight"] = torch.full((3,), value, device=device)
                    case 2:
                        world["weight"].data = torch.full((3,), value, device=device)
                    case _:
                        world["scale"] = value

    def look() -> None:
        while not done.wait(0.005):
            assert jitted.cache_info().size <= 2
            assert "pygraph" in str(jitted.explain())

    def clear() -> None:
        while not done.wait(0.02):
            jitted.cache_clear()

    helpers = [threading.Thread(target=work, daemon=True) for work in (change, look, clear)]
    for helper in helpers:
        helper.start()
    try:
        run_threads(*map(call, range(callers)))
    finally:
        done.set()
        for helper in helpers:
            helper.join(60)
    assert not any(helper.is_alive() for helper in helpers)


def test_threads_share_a_compiled_function_with_the_jitted_one(device: torch.device) -> None:
    """They replay on one pool of memory, so they take turns with each other too."""
    fn = lambda x, k: torch.relu(x * k).cumprod(0)  # noqa: E731  (a kernel that hides its pointers: copied inputs)
    jitted = pygraph.jit(fn)
    compiled = jitted.lower(torch.ones(4, device=device), 1.0).compile()

    def work(run: Any, seed: int) -> Callable[[], None]:
        def calls() -> None:
            for step in range(25):
                x = torch.full((4,), 1.0 + (seed + step) % 7 / 8, device=device)
                assert torch.equal(run(x, float(seed)), fn(x, float(seed)))

        return calls

    run_threads(*(work(run, seed) for seed, run in enumerate((jitted, compiled, jitted, compiled), 1)))


def test_many_functions_are_compiled_at_once(device: torch.device) -> None:
    def work(seed: int) -> Callable[[], None]:
        def run() -> None:
            for step in range(3):
                offset = float(seed * 10 + step)
                fn = pygraph.jit(lambda x, offset=offset: torch.relu(x) @ x + offset)
                x = torch.eye(4, device=device) * (seed + 1)
                for _ in range(2):
                    assert torch.equal(fn(x), torch.relu(x) @ x + offset)

        return run

    run_threads(*map(work, range(4)))


def test_a_thread_that_is_new_to_the_device_calls_a_cached_graph(device: torch.device) -> None:
    fn = pygraph.jit(lambda x: torch.relu(x) + 1)
    x = torch.ones(5, device=device)
    fn(x)
    results: list[torch.Tensor] = []
    run_threads(*[lambda: results.append(fn(x))] * 3)
    for result in results:
        assert torch.equal(result, x + 1)
    assert fn.cache_info().misses == 1


# ---- calls inside calls ----------------------------------------------------------------------------------------


class Nested:
    """What the operation below runs, each time it runs for real."""

    then: Callable[[torch.Tensor], torch.Tensor] = staticmethod(torch.clone)


@pytest.fixture
def nested() -> Iterator[type[Nested]]:
    yield Nested
    Nested.then = staticmethod(torch.clone)


@torch.library.custom_op("pygraph_tests_threads::nested", mutates_args=())
def _op(x: torch.Tensor, wait: bool) -> torch.Tensor:
    if wait:
        x.sum().item()  # on the host, so that it runs between graphs
    return Nested.then(x).clone()


@_op.register_fake
def _(x: torch.Tensor, wait: bool) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("max_graphs", [1, 64])
def test_recursion_through_an_operation(
    device: torch.device, nested: type[Nested], wait: bool, max_graphs: int
) -> None:
    """What is called inside has other shapes, so that it would evict what is running."""

    def fn(x: torch.Tensor, again: Any) -> torch.Tensor:
        return _op(x * 2, wait) + again(x) if x.shape[0] < 4 else x + 1

    def inner(call: Any) -> Any:
        return lambda x: call(torch.cat([x, x[:1]]))[: x.shape[0]]

    def eager(x: torch.Tensor) -> torch.Tensor:
        return fn(x, torch.clone)

    jitted = pygraph.jit(eager, max_graphs=max_graphs)
    for step in range(4):
        x = torch.full((2,), float(step), device=device)
        nested.then = staticmethod(inner(eager))
        expected = eager(x)
        nested.then = staticmethod(inner(jitted))
        assert torch.equal(jitted(x), expected)
    assert here.inside is False


def test_a_function_that_calls_itself_and_others_is_traced_through(device: torch.device) -> None:
    @pygraph.jit
    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @pygraph.jit
    def fn(x: torch.Tensor, depth: int) -> torch.Tensor:
        return other(x) if depth == 0 else fn(x + 1, depth - 1)

    x = torch.ones(3, device=device)
    for depth in (0, 2, 0, 2):
        assert torch.equal(fn(x, depth), (x + depth) * 3)
    assert other.cache_info().misses == 0


def test_a_call_between_patching_and_launching(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a finalizer that the garbage collector runs, or a signal handler."""
    fn = lambda x, k: (x * k).relu()  # noqa: E731
    jitted = pygraph.jit(fn)
    x, other = torch.full((3,), 2.0, device=device), torch.full((3,), 5.0, device=device)
    jitted(other, 1.0)
    inside: list[torch.Tensor] = []
    patch = Patcher.__call__

    def interrupted(self: Any, *args: Any) -> Any:
        done = patch(self, *args)
        if not inside:
            inside.append(torch.empty(0))
            inside[0] = jitted(other, 7.0)
            jitted.cache_clear()
        return done

    monkeypatch.setattr(Patcher, "__call__", interrupted)
    assert torch.equal(jitted(x, 3.0), fn(x, 3.0))
    assert torch.equal(inside[0], fn(other, 7.0))
    assert any(fallback["reason"] == INSIDE_CALL for fallback in jitted.explain().to_dict()["fallbacks"])
    assert torch.equal(jitted(x, 4.0), fn(x, 4.0))
    assert jitted.cache_info()[:2] == (0, 1), "the cache is cleared before the next call"


def test_functions_that_call_each_other_from_two_threads(device: torch.device, nested: type[Nested]) -> None:
    """Each thread is inside one function and wants the other."""
    meeting = threading.Barrier(2)
    mine = threading.local()  # the other function, until it has been called

    def then(x: torch.Tensor) -> torch.Tensor:
        other = getattr(mine, "other", None)
        if other is None:
            return x
        mine.other = None
        meeting.wait(60)
        return other(x)

    nested.then = staticmethod(then)
    first = pygraph.jit(lambda x: _op(x + 1, True) * 2)
    second = pygraph.jit(lambda x: _op(x * 3, True) - 1)
    x = torch.ones(3, device=device)
    for function in (first, second):
        function(x)
    results: dict[Any, torch.Tensor] = {}

    def work(function: Any, other: Any) -> None:
        mine.other = other
        results[function] = function(x)

    run_threads(lambda: work(first, second), lambda: work(second, first), timeout=90)
    assert torch.equal(results[first], ((x + 1) * 3 - 1) * 2)
    assert torch.equal(results[second], ((x * 3) + 1) * 2 - 1)


def _cannot_compute(frame: Any) -> bool:
    """Whether a handler must not compute: in a trace or a capture, which would contain it, and in the device itself."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    while frame is not None:
        if frame.f_code.co_filename.endswith("/pygraph/tracing/trace.py") or "emulated" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_a_signal_handler_that_calls_the_function(device: torch.device) -> None:
    fn = lambda x: (x * 2).relu() + 1  # noqa: E731
    jitted = pygraph.jit(fn, max_graphs=2)
    other = torch.full((7,), 3.0, device=device)
    seen: list[bool] = []

    def handler(_: int, frame: Any) -> None:
        if len(seen) < 50 and not _cannot_compute(frame):
            seen.append(torch.equal(fn(other), jitted(other)))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        jitted(other)
        for step in range(1, 60):
            x = torch.full((3,), float(step), device=device)
            assert torch.equal(jitted(x), x * 2 + 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(seen)


def test_hooks_call_the_function(device: torch.device) -> None:
    """Module hooks inside (traced through), tensor hooks in a backward (on the engine's thread)."""
    inner = pygraph.jit(lambda g: g * 2)
    leaf = torch.ones(3, device=device, requires_grad=True)
    leaf.register_hook(lambda grad: inner(grad.detach()))
    (leaf * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 6.0))  # type: ignore[arg-type]
    layer = nn.Linear(3, 3).to(device)
    layer.register_forward_hook(lambda module, args, out: inner(out))
    fast = pygraph.jit(layer)
    with torch.no_grad():
        x = torch.ones(2, 3, device=device)
        for _ in range(2):
            torch.testing.assert_close(fast(x), layer(x))
    assert fast.cache_info()[:2] == (1, 1)


def test_a_call_inside_torch_function(device: torch.device) -> None:
    fn = pygraph.jit(lambda x: x * 2 + 1)

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.relu:
                return fn(args[0].as_subclass(torch.Tensor))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(3, device=device)
    for _ in range(2):
        assert torch.relu(x.as_subclass(Logged)).tolist() == [3.0] * 3
    assert fn.cache_info().hits == 1


@pytest.mark.parametrize("kind", ["dispatch", "function"])
def test_a_mode_sees_every_operation(device: torch.device, kind: str) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 10 if func is torch.ops.aten.relu.default else out

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 10 if func is torch.relu else out

    mode = {"dispatch": Dispatch, "function": Function}[kind]
    fn = lambda x: torch.relu(x) + 1  # noqa: E731
    jitted, x = pygraph.jit(fn), torch.ones(3, device=device)
    for _ in range(2):
        with mode():
            assert jitted(x).tolist() == fn(x).tolist() == [11.0] * 3
        assert jitted(x).tolist() == [2.0] * 3
    with mode(), pytest.raises(FallbackError, match="a mode is active"):
        pygraph.jit(fn, strict=True)(x)
    with device:  # a default device is a mode as well, and no reason
        assert pygraph.jit(fn, strict=True)(x).tolist() == [2.0] * 3


# ---- processes -------------------------------------------------------------------------------------------------


def run_script(tmp_path: Path, text: str, device: torch.device, timeout: float = 300) -> list[str]:
    """Run a script in a fresh interpreter; returns its lines of output."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), "cuda" if device.type == "cuda" else "emulated"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


START = """
    import os, signal, sys, threading
    os.environ["PYGRAPH_DEVICE"] = sys.argv[1]
    import torch
    import pygraph

    device = pygraph.default_device()

    @pygraph.jit
    def fn(x, k):
        return torch.relu(x * k) + 1

    module = pygraph.jit(torch.nn.Linear(3, 3))
"""

FORK = (
    START
    + """
    x = torch.ones(3, device=device)
    fn(x, 2.0)

    def child(work):
        pid = os.fork()
        if pid == 0:
            signal.alarm(100)
            try:
                print(work(), flush=True)
            except pygraph.errors.DeviceError as error:
                assert "forked" in str(error) and "spawn" in str(error)
                print("DeviceError", flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

    child(lambda: fn(x, 3.0).tolist() == [4.0] * 3)
    child(lambda: pygraph.jit(lambda x: x + 1)(x).tolist() == [2.0] * 3)
    child(lambda: fn(torch.ones(2), 3.0).tolist() == [4.0] * 2)  # on the cpu
    child(lambda: "pygraph" in str(fn.explain()) and fn.cache_clear() is None)
    print(fn(x, 4.0).tolist() == [5.0] * 3)
"""
)


def test_fork(device: torch.device, tmp_path: Path) -> None:
    lines = run_script(tmp_path, FORK, device)
    on_device = "DeviceError" if device.type == "cuda" else "True"
    assert lines == [on_device, "0", on_device, "0", "True", "0", "True", "0", "True"]


FORK_IN_A_CALL = (
    START
    + """
    inside, leave = threading.Event(), threading.Event()

    @torch.library.custom_op("pygraph_tests_fork::wait", mutates_args=())
    def wait(x: torch.Tensor) -> torch.Tensor:
        x.sum().item()
        if armed:
            inside.set()
            leave.wait(60)
        return x.clone()

    @wait.register_fake
    def _(x):
        return torch.empty_like(x)

    slow = pygraph.jit(lambda x: wait(x * 2) + 1)
    armed = False
    x = torch.ones(3, device=device)
    slow(x)
    armed = True
    thread = threading.Thread(target=slow, args=(x,))
    thread.start()
    inside.wait(60)
    armed = False
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        try:
            print(slow(x).tolist() == [3.0] * 3, flush=True)
        except pygraph.errors.DeviceError:
            print("DeviceError", flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    leave.set()
    thread.join()
    print(slow(x).tolist() == [3.0] * 3)
"""
)


def test_fork_while_another_thread_is_inside_a_call(device: torch.device, tmp_path: Path) -> None:
    lines = run_script(tmp_path, FORK_IN_A_CALL, device)
    assert lines == ["DeviceError" if device.type == "cuda" else "True", "0", "True"]


FORK_IN_A_TRACE = (
    START
    + """
    import gc

    inside, leave = threading.Event(), threading.Event()

    def slow(x):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            leave.wait(60)
        return x * 2 + 1

    x = torch.ones(3)  # of the CPU, which a child may use
    traced = pygraph.trace(slow)
    aside = gc.get_freeze_count()  # what imports have set aside, as some do
    thread = threading.Thread(target=traced, args=(x,))
    thread.start()
    inside.wait(60)
    assert not gc.isenabled() and gc.get_freeze_count()
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        print(gc.isenabled(), gc.get_freeze_count() - aside, flush=True)
        print("mul" in str(traced(x)), flush=True)
        print(gc.isenabled(), gc.get_freeze_count() - aside, flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    leave.set()
    thread.join()
    print(gc.isenabled(), gc.get_freeze_count() - aside)
"""
)


def test_fork_while_another_thread_traces(device: torch.device, tmp_path: Path) -> None:
    """What a trace has switched for the process is switched back in the child, where no thread would do it."""
    lines = run_script(tmp_path, FORK_IN_A_TRACE, device)
    assert lines == ["True", "0", "True", "True", "0", "0", "True", "0"]


SPAWN = (
    START
    + """
    def work(fn, module, k):
        with torch.no_grad():
            one = fn(torch.ones(3, device=device), k)
            two = module.to(device)(torch.ones(1, 3, device=device))
        return one.tolist(), two.tolist(), fn.cache_info().misses, module.cache_info().misses

    if __name__ == "__main__":
        import multiprocessing

        fn(torch.ones(3, device=device), 1.0)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            one, two, *misses = pool.apply(work, (fn, module, 3.0))
        print(one == [4.0] * 3)
        with torch.no_grad():
            expected = module.to(device)(torch.ones(1, 3, device=device))
        print(torch.allclose(torch.tensor(two), expected.cpu()))
        print(misses == [1, 1])
"""
)


@pytest.mark.slow
def test_spawned_processes_get_functions_and_modules(device: torch.device, tmp_path: Path) -> None:
    assert run_script(tmp_path, SPAWN, device) == ["True", "True", "True"]


# ---- the garbage collector -------------------------------------------------------------------------------------


class _Ring:
    """Garbage that only the collector finds."""

    def __init__(self, finalizer: Callable[[], object]) -> None:
        self.ring = self
        weakref.finalize(self, finalizer).atexit = False


def test_finalizers_that_call_the_function(device: torch.device) -> None:
    fn = lambda x, k: (x * k).relu() + 1  # noqa: E731
    jitted = pygraph.jit(fn, max_graphs=1)
    other = torch.full((5,), 2.0, device=device)
    wrong: list[Any] = []
    count, steps = 0, extent.examples(2, 14)

    def finalizer() -> None:
        nonlocal count
        count += 1
        if not torch.equal(jitted(other, 3.0), torch.full_like(other, 7.0)):
            wrong.append(count)
        jitted.cache_clear()

    threshold = gc.get_threshold()
    gc.set_threshold(50, 1, 1000)  # young objects alone: all tests before this one have left many others
    try:
        for step in range(1, steps + 1):
            for _ in range(3):
                _Ring(finalizer)
            x = torch.full((step % 3 + 1,), float(step), device=device)
            if not torch.equal(jitted(x, 2.0), x * 2 + 1):
                wrong.append(x)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert count == steps * 3
    assert wrong == []
    assert here.inside is False
    assert gc.isenabled()


def test_a_finalizer_is_not_part_of_a_trace(device: torch.device) -> None:
    log = torch.zeros(1, device=device)

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        _Ring(lambda: log.add_(1))
        filler = [[] for _ in range(2000)]
        return x * len(filler)

    threshold = gc.get_threshold()
    gc.set_threshold(50, 1, 1000)  # young objects alone: all tests before this one have left many others
    x = torch.ones(2, device=device)
    try:
        for _ in range(3):
            assert fn(x).tolist() == [2000.0] * 2
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    traces = fn.cache_info().misses
    assert traces == 1
    assert log.item() <= 2, "one per trace of a call, none per replay"
    assert all("log" not in str(entry["arguments"]) for entry in fn.explain().to_dict()["entries"])


def test_collecting_inside_a_traced_function(device: torch.device) -> None:
    weight = torch.ones(3, device=device)

    @pygraph.jit
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * weight
        _Ring(lambda: None)
        gc.collect()
        return y + 1

    for _ in range(3):
        assert fn(weight).tolist() == [2.0] * 3
    assert fn.cache_info()[:2] == (2, 1)


ACCUMULATORS = """
import faulthandler, sys, threading, torch, pygraph
from pygraph.autograd.interpreters import LevelFunction
faulthandler.dump_traceback_later(100, exit=True)

class Alias(LevelFunction):
    @staticmethod
    def forward(ctx, call, transform, tensor):
        return (tensor.detach(),)

leaf = torch.ones(4, 4, device=pygraph.default_device(), requires_grad=True)
x = torch.ones(2, 4, device=leaf.device)

def eager():
    for _ in range(20_000):
        torch.nn.functional.linear(x, leaf)

def applied():
    for _ in range(20_000):
        Alias.at(None, None, [leaf])

sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=run) for run in (eager, applied, applied)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_make_the_accumulator_of_one_leaf(tmp_path: Path, device: torch.device) -> None:
    """Torch makes it with the leaf's mutex held, and may wait for the interpreter, which another thread has."""
    run_script(tmp_path, ACCUMULATORS, device)
