"""Streams, devices and captures of others on a GPU.

The graphs here take milliseconds and read what could be overwritten at their end, so that a wait that is missing
gives a wrong result.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import CaptureError

if torch.cuda.is_available():
    from pygraph.runtime.cuda import captures as cuda_captures
    from pygraph.runtime.cuda import costs as cuda_costs

pytestmark = pytest.mark.gpu

LARGE = 1 << 25
SLEEP = 30_000_000  # cycles: some 20 milliseconds

TRANSFORMS: dict[str, Callable[[Any], Any]] = {"jit": pygraph.jit, "copied inputs": pygraph.graphify}


@pytest.fixture(params=TRANSFORMS)
def transform(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return TRANSFORMS[request.param]


@pytest.fixture(scope="module")
def large() -> Any:
    yield (value := torch.ones(LARGE, device="cuda"))
    del value


def late(large: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``x`` is read after some milliseconds."""
    for _ in range(40):
        large = large * 1.0
    return torch.relu(x) * large[:1] + 1


def full(value: float, size: int = 1 << 16) -> torch.Tensor:
    return torch.full((size,), float(value), device="cuda")


def on(stream: torch.cuda.Stream) -> Any:
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


# ---- one function on several streams ---------------------------------------------------------------------------


def test_calls_on_several_streams(transform: Any, large: torch.Tensor) -> None:
    fn = transform(late)
    streams = [torch.cuda.Stream() for _ in range(3)]
    xs = [full(n) for n in range(12)]
    fn(large, xs[0])
    torch.cuda.synchronize()
    results = []
    for n, x in enumerate(xs):
        with torch.cuda.stream(streams[n % 3]):
            results.append(fn(large, x))
    torch.cuda.synchronize()
    for n, result in enumerate(results):
        assert torch.equal(result, full(n + 1)), n
    fn.cache_clear()


def test_calls_on_several_streams_from_several_threads(transform: Any, large: torch.Tensor) -> None:
    fn = transform(late)
    fn(large, full(0))
    torch.cuda.synchronize()
    results: dict[int, torch.Tensor] = {}

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(4):
                number = seed * 10 + step
                results[number] = fn(large, full(number))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 16
    for number, result in results.items():
        assert torch.equal(result, full(number + 1)), number
    fn.cache_clear()


def test_work_queued_on_the_stream_comes_first(transform: Any) -> None:
    fn = transform(lambda x: torch.relu(x) + 1)
    x = full(0)
    fn(x)
    stream = torch.cuda.Stream()
    with on(stream):
        torch.cuda._sleep(SLEEP)
        x.fill_(3)
        result = fn(x)
        x.fill_(9)
    stream.synchronize()
    assert torch.equal(result, full(4))


def test_the_first_call_may_be_on_any_stream(transform: Any) -> None:
    """What the recording copies and compares waits for the work that makes the arguments."""
    fn = transform(lambda x: torch.relu(x) + 1)
    stream = torch.cuda.Stream()
    x = full(0)
    with on(stream):
        torch.cuda._sleep(SLEEP)
        x.fill_(3)
        result = fn(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        other = full(5)
        torch.cuda.current_stream().synchronize()
        again = fn(other)
    torch.cuda.synchronize()
    assert torch.equal(result, full(4))
    assert torch.equal(again, full(6))


def test_random_numbers_of_two_functions_on_two_streams(large: torch.Tensor) -> None:
    """Graphs of one generator may share the memory that their seed and offset are in."""

    def draw(large: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return late(large, x) + torch.rand(x.shape, device="cuda")

    def draw_more(large: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return late(large, x) - torch.rand(x.shape, device="cuda")

    functions = (draw, draw_more)
    fast = [pygraph.jit(fn) for fn in functions]
    x = full(1)
    for fn in fast:
        fn(large, x)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.manual_seed(5)
    expected = [functions[n % 2](large, x) for n in range(6)]
    torch.manual_seed(5)
    torch.cuda.synchronize()
    results = []
    for n in range(6):
        with torch.cuda.stream(streams[n % 2]):
            results.append(fast[n % 2](large, x))
    torch.cuda.synchronize()
    for got, want in zip(results, expected, strict=True):
        assert torch.equal(got, want)


def test_matrix_products_of_two_functions_on_two_streams(large: torch.Tensor) -> None:
    """Products that are split over the long dimension use a workspace."""
    a = torch.randn(64, 1 << 16, device="cuda")
    b = torch.randn(1 << 16, 64, device="cuda")
    fns = [lambda a, b: a @ b + 0.0, lambda a, b: (a @ b) * 2.0]
    fast = [pygraph.jit(fn) for fn in fns]
    expected = [fn(a, b) for fn in fns]
    for fn in fast:
        fn(a, b)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for n in range(40):
        with torch.cuda.stream(streams[n % 2]):
            results.append(fast[n % 2](a, b))
    torch.cuda.synchronize()
    for n, result in enumerate(results):
        torch.testing.assert_close(result, expected[n % 2], rtol=1e-3, atol=1e-1)


def test_workspaces_that_somebody_clears() -> None:
    """The cudagraph trees of torch.compile clear them; a graph must not go on writing to that memory."""
    a = torch.randn(64, 1 << 16, device="cuda")
    b = torch.randn(1 << 16, 64, device="cuda")
    fn = pygraph.jit(lambda a, b: torch.relu(a @ b))
    expected = torch.relu(a @ b)
    fn(a, b)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 22,), 7.0, device="cuda") for _ in range(32)]
    for _ in range(3):
        torch.testing.assert_close(fn(a, b), expected, rtol=1e-3, atol=1e-1)
    torch.cuda.synchronize()
    assert all(bool((part == 7).all()) for part in junk)


# ---- memory ----------------------------------------------------------------------------------------------------


def test_an_input_is_freed_and_its_memory_reused_on_the_same_stream(transform: Any, large: torch.Tensor) -> None:
    fn = transform(late)
    fn(large, full(0))
    stream = torch.cuda.Stream()
    with on(stream):
        for n in range(4):
            x = full(n)
            address = x.data_ptr()
            result = fn(large, x)
            del x
            junk = full(float("nan"))
            assert junk.data_ptr() == address
            del junk
            assert torch.equal(result, full(n + 1))


def test_an_input_is_freed_and_its_memory_reused_on_another_stream(transform: Any, large: torch.Tensor) -> None:
    fn = transform(late)
    fn(large, full(0))
    stream = torch.cuda.Stream()
    for n in range(4):
        x = full(n)
        with on(stream):
            result = fn(large, x)
        x.record_stream(stream)  # as for every operation
        del x
        junk = [full(float("nan")) for _ in range(4)]
        stream.synchronize()
        assert torch.equal(result, full(n + 1))
        del junk


def test_a_result_is_used_on_another_stream(transform: Any) -> None:
    fn = transform(lambda x: torch.relu(x) + 1)
    fn(full(0))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for n in range(4):
        x = full(n)
        with on(streams[0]):
            torch.cuda._sleep(SLEEP)
            result = fn(x)
            x.record_stream(streams[0])
        streams[1].wait_stream(streams[0])
        with torch.cuda.stream(streams[1]):
            torch.cuda._sleep(SLEEP)
            after = result * 2
            result.record_stream(streams[1])
        del result
        with torch.cuda.stream(streams[0]):
            junk = [full(float("nan")) for _ in range(4)]
        streams[1].synchronize()
        assert torch.equal(after, full(2 * n + 2))
        del junk


def test_events(transform: Any, large: torch.Tensor) -> None:
    fn = transform(late)
    fn(large, full(0))
    streams = [torch.cuda.Stream() for _ in range(2)]
    event = torch.cuda.Event()
    with on(streams[0]):
        result = fn(large, full(4))
        event.record()
        torch.cuda._sleep(SLEEP)
    with torch.cuda.stream(streams[1]):
        streams[1].wait_event(event)
        after = result + 1
    event.synchronize()
    streams[1].synchronize()
    assert torch.equal(after, full(6))
    torch.cuda.synchronize()


@pytest.mark.parametrize("how", ["clear", "delete", "evict"])
def test_a_graph_goes_while_it_runs(transform: Any, large: torch.Tensor, how: str) -> None:
    fn = transform(late) if how != "evict" else pygraph.jit(late, max_graphs=1)
    fn(large, full(0))
    stream = torch.cuda.Stream()
    x = full(4)
    with on(stream):
        result = fn(large, x)
    match how:
        case "clear":
            fn.cache_clear()
        case "delete":
            del fn
            gc.collect()
        case _:
            fn(large[:16], full(1))
    junk = [full(float("nan")) for _ in range(8)]
    stream.synchronize()
    assert torch.equal(result, full(5))
    del junk


# ---- captures of others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
def test_a_call_during_a_capture_of_the_users(transform: Any, cached: bool) -> None:
    fn = transform(lambda x: torch.relu(x) + 1)
    x = full(2)
    if cached:
        fn(x)
    else:
        torch.relu(x)
    misses = fn.cache_info().misses
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn(x)
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(result, full(value + 1))
        assert torch.equal(fn(full(value)), full(value + 1))
    assert fn.cache_info().misses == max(misses, 1)
    del result, graph


def test_a_call_during_a_capture_of_what_is_more_than_a_replay() -> None:
    """It goes natively to an executable in Python, which must not launch a graph into a capture."""
    fn = pygraph.jit(lambda x: (x.view(-1), x * 2))
    x = full(1)
    for _ in range(4):
        fn(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn(x)[1]
    x.fill_(3)
    graph.replay()
    assert torch.equal(result, full(6))
    del result, graph


def test_the_stream_of_the_last_replay_is_being_captured(transform: Any) -> None:
    """Another stream could not wait for it without ending that capture."""
    fn = transform(lambda x: x * 2)
    x = full(1)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    for stream in (other, side):
        with torch.cuda.stream(stream):
            for _ in range(3):
                fn(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="relaxed"):
        captured = x + 1
        with torch.cuda.stream(other):
            result = fn(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, full(2))
    assert torch.equal(captured, full(2))
    assert "is being captured" in str(fn.explain().to_dict()["fallbacks"])
    assert torch.equal(fn(x), full(2))
    del captured, graph


def test_what_was_closed_over_is_checked_before_anything_is_launched() -> None:
    """What was right for the old values may end the process: an index that the function does not use any more."""
    table, how = torch.arange(8.0, device="cuda"), {"looked up": True}
    fn = pygraph.jit(lambda i: table[i] if how["looked up"] else i * 2.0)
    for _ in range(4):
        fn(torch.tensor([0, 1], device="cuda"))
    how["looked up"] = False
    for _ in range(3):
        assert fn(torch.tensor([5000, 7000], device="cuda")).tolist() == [10000.0, 14000.0]


def in_a_thread(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    outcome: list[Any] = [None, None]

    def run() -> None:
        try:
            outcome[0] = work()
        except BaseException as error:
            outcome[1] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    return outcome[0], outcome[1]


def test_a_cached_call_while_another_thread_captures(transform: Any) -> None:
    fn = transform(lambda x: torch.relu(x) + 1)
    x, y = full(2), full(3)
    fn(x)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()

    def call() -> torch.Tensor:
        with torch.cuda.stream(side):
            result = fn(y)
            side.synchronize()
        return result

    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = torch.relu(x) * 2
        result, error = in_a_thread(call)
        captured = captured + 1
    assert error is None
    assert torch.equal(result, full(4))
    x.fill_(5)
    graph.replay()
    assert torch.equal(captured, full(11))
    del captured, graph


def test_a_first_call_while_another_thread_captures(transform: Any) -> None:
    """CUDA lets nobody wait for a device on which a capture is going on: right, or a clear error, and then right."""
    fn = transform(lambda x: torch.relu(x) + 1)
    x, y = full(2), full(3)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()

    def call() -> torch.Tensor:
        with torch.cuda.stream(side):
            result = fn(y)
            side.synchronize()
        return result

    torch.relu(x) * 2 + 1
    broken: BaseException | None = None
    result: Any = None
    error: BaseException | None = None
    try:
        # torch's capture that is broken leaves its stream the current one (2.11 to 2.13); the outer one puts ours back.
        ours, capture = torch.cuda.current_stream(), torch.cuda.graph(graph, capture_error_mode="thread_local")
        with torch.cuda.stream(ours), capture:
            captured = torch.relu(x) * 2
            result, error = in_a_thread(call)
            captured = captured + 1
    except RuntimeError as failure:
        broken = failure
    print(f"the call: {error!r}; the capture: {broken!r}")
    assert error is None or isinstance(error, (CaptureError, RuntimeError))
    if error is None:
        assert torch.equal(result, full(4))
    torch.cuda.synchronize()
    assert torch.equal(fn(y), full(4))
    assert torch.equal(call(), full(4))


def test_nobody_else_has_the_stream_that_captures() -> None:
    """Torch's pool has so few streams that the hundred below are each of them several times."""
    from pygraph.runtime.cuda import captures as cuda_captures

    device = torch.device("cuda", torch.cuda.current_device())
    ours = cuda_captures.capture_stream(device)
    others = [torch.cuda.Stream(device, priority=priority) for priority in (0, -1) for _ in range(100)]
    assert len({stream.cuda_stream for stream in others}) < len(others)
    assert ours.cuda_stream not in {stream.cuda_stream for stream in others}
    assert cuda_captures.capture_stream(device) is ours


def test_threads_that_wait_and_allocate_while_functions_are_recorded() -> None:
    """An innocent thread gets no error because another one makes its first call."""
    done = threading.Event()
    errors: list[BaseException] = []

    def disturb() -> None:
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                while not done.is_set():
                    parts = [torch.full((1 << 20,), 2.0, device="cuda") for _ in range(4)]
                    assert torch.stack(parts).sum().item() == 2.0 * (4 << 20)
                    del parts
                    torch.cuda.empty_cache()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for n in range(8):
            fn = pygraph.jit(lambda x, n=n: torch.relu(x @ x) + n)
            x = torch.eye(64, device="cuda")
            for _ in range(3):
                assert torch.equal(fn(x), torch.eye(64, device="cuda") + n)
            assert fn.explain().to_dict()["fallbacks"] == []
    finally:
        done.set()
        thread.join()
    assert errors == []


def test_a_thread_that_waits_for_the_device_while_functions_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA gives that thread an error and ends our capture, which is made again; results are right in any case."""
    done = threading.Event()
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path))  # so that costs are measured too, by captures
    cuda_costs._measured_costs.cache_clear()  # pyright: ignore[reportPrivateUsage]

    def disturb() -> None:
        while not done.wait(0.002):
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()

    thread = threading.Thread(target=disturb)
    thread.start()
    x = torch.eye(64, device="cuda")
    try:
        for n in range(8):
            fn = pygraph.jit(lambda x, n=n: torch.relu(x @ x) + n)
            for _ in range(3):
                assert torch.equal(fn(x), torch.eye(64, device="cuda") + n)
    finally:
        done.set()
        thread.join()
    fn = pygraph.jit(lambda x: torch.relu(x @ x) + 9)
    assert torch.equal(fn(x), torch.eye(64, device="cuda") + 9)
    assert fn.explain().to_dict()["fallbacks"] == []
    assert cuda_captures.put_off() == 0


@pytest.mark.parametrize("where", ["here", "in another thread", "on the stream that captures"])
def test_a_function_goes_during_a_capture_of_the_users(transform: Any, where: str) -> None:
    """Nobody waits for the device then, which would end the capture; what is left goes later."""
    fn = transform(lambda x: torch.relu(x) + 1)
    x = full(2)
    side = torch.cuda.Stream()
    with on(side if where == "on the stream that captures" else torch.cuda.current_stream()):
        fn(x)
        fn(full(3))
    torch.relu(x) * 2 + 1
    graph = torch.cuda.CUDAGraph()

    def drop() -> None:
        nonlocal fn
        del fn
        gc.collect()

    error: BaseException | None = None
    with torch.cuda.graph(graph, stream=side):  # in its default mode, which forbids most
        captured = torch.relu(x) * 2
        if where == "here":
            drop()
        else:
            error = in_a_thread(drop)[1]
        captured = captured + 1
    assert error is None
    x.fill_(5)
    graph.replay()
    assert torch.equal(captured, full(11))
    assert torch.equal(transform(lambda x: x * 3)(x), full(15))
    assert cuda_captures.put_off() == 0
    del captured, graph


_meanwhile: list[Callable[[], None]] = []


@torch.library.custom_op("pygraph_test_streams::meanwhile", mutates_args=())
def meanwhile(x: torch.Tensor) -> torch.Tensor:
    """A copy; while it is captured, something else happens."""
    if torch.cuda.is_current_stream_capturing():
        for work in _meanwhile:
            work()
    return x.clone()


meanwhile.register_fake(torch.empty_like)


def test_functions_go_and_caches_are_emptied_while_another_is_recorded(transform: Any) -> None:
    held = [transform(lambda x, n=n: torch.relu(x) + n) for n in range(2)]
    x = full(2)
    for fn in held:
        fn(x)
    errors: list[BaseException | None] = []

    def work() -> None:
        if held:
            held.pop()
        gc.collect()
        errors.append(in_a_thread(torch.cuda.empty_cache)[1])

    _meanwhile.append(work)
    try:
        fn = transform(lambda x: meanwhile(x) * 3)
        assert torch.equal(fn(x), full(6))
    finally:
        _meanwhile.clear()
    assert len(errors) > 1
    assert set(errors) == {None}
    assert torch.equal(fn(full(3)), full(9))
    assert fn.explain().to_dict()["fallbacks"] == []
    assert cuda_captures.put_off() == 0


def test_all_that_with_expandable_segments() -> None:
    """Torch's other way to get memory waits for the streams on which it was used when it gives it back."""
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        return
    options = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:xdist", "-k"]
    command = [sys.executable, *options, "goes or go_ or wait", __file__]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_new_thread_patches_copies_and_fills() -> None:
    """Nodes that are not kernels are patched in a CUDA context, which a new thread does not have yet."""
    fn = pygraph.jit(lambda x: (x.clone(), torch.zeros_like(x), torch.relu(x)))
    fn(full(1))
    x = full(2)
    result, error = in_a_thread(lambda: fn(x))
    assert error is None
    for got, want in zip(result, (2, 0, 2), strict=True):
        assert torch.equal(got, full(want))
    assert fn.cache_info().misses == 1


# ---- several devices -------------------------------------------------------------------------------------------

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_devices
def test_another_device_is_the_current_one(transform: Any) -> None:
    fn = transform(lambda x: (torch.relu(x) + 1, x.clone(), torch.zeros_like(x)))
    for n in range(4):
        x = torch.full((1000,), float(n), device="cuda:1")
        with torch.cuda.device(n % 2):
            results = fn(x)
            assert torch.cuda.current_device() == n % 2
        for got, want in zip(results, (n + 1, n, 0), strict=True):
            assert got.device == torch.device("cuda", 1)
            assert torch.equal(got, torch.full((1000,), float(want), device="cuda:1"))
    assert fn.cache_info()[:2] == (2, 2)  # one for each device that was the current one


@two_devices
def test_which_device_is_the_current_one_matters() -> None:
    fn = pygraph.jit(lambda k: torch.arange(4.0, device="cuda") * k)
    for n in range(12):
        with torch.cuda.device(n // 3 % 2):
            got = fn(2.0)
            assert got.device.index == n // 3 % 2
            assert got.tolist() == [0, 2, 4, 6]


@two_devices
@pytest.mark.parametrize("mechanism", ["auto", "host", "device", "copy"])
def test_each_mechanism_on_another_device(mechanism: Any) -> None:
    fn = pygraph.graphify(pygraph.indirect(lambda *xs: (torch.stack(xs), sum(xs)), mechanism=mechanism))
    for n in range(4):
        xs = [torch.full((100,), float(n * i), device="cuda:1") for i in range(8)]
        stacked, total = fn(*xs)
        assert torch.equal(stacked, torch.stack(xs))
        assert torch.equal(total, sum(xs))  # pyright: ignore
        assert torch.cuda.current_device() == 0
    assert fn.cache_info()[:2] == (3, 1)
    assert (fn.explain().to_dict()["bytes_copied_per_replay"] > 0) == (mechanism == "copy")


@two_devices
def test_one_function_on_two_devices(transform: Any) -> None:
    fn = transform(lambda x: torch.relu(x @ x) + torch.rand_like(x))
    plain = lambda x: torch.relu(x @ x) + torch.rand_like(x)  # noqa: E731
    for device in ("cuda:0", "cuda:1", "cuda:1", "cuda:0"):
        x = torch.eye(32, device=device)
        torch.manual_seed(1)
        expected = [plain(x) for _ in range(2)]
        torch.manual_seed(1)
        for want in expected:
            torch.testing.assert_close(fn(x), want)
    assert fn.cache_info().misses == 2


@two_devices
def test_a_function_over_two_devices_runs_as_it_is(transform: Any) -> None:
    function = lambda x, y: (torch.relu(x) + y.to(x.device), y * 2 + torch.rand_like(y))  # noqa: E731
    fn = transform(function)
    for n in range(3):
        x = torch.full((8,), float(n), device="cuda:0")
        y = torch.full((8,), float(n + 1), device="cuda:1")
        torch.manual_seed(n)
        expected = function(x, y)
        torch.manual_seed(n)
        for got, want in zip(fn(x, y), expected, strict=True):
            assert got.device == want.device
            assert torch.equal(got, want)
    assert "a graph is of one device" in str(fn.explain().to_dict()["fallbacks"])


@two_devices
def test_threads_on_two_devices() -> None:
    fn = pygraph.jit(lambda x, k: torch.relu(x * k) + 1)
    errors: list[BaseException | None] = []

    def work(index: int) -> None:
        with torch.cuda.device(index):
            for step in range(20):
                x = torch.full((100 + step % 3,), float(step), device="cuda")
                assert torch.equal(fn(x, 2.0), x * 2 + 1)

    threads = [threading.Thread(target=lambda i=i: errors.append(in_a_thread(lambda: work(i))[1])) for i in (0, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None] * 3
