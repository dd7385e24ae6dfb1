"""What only a GPU can show: node order, failed captures, streams, pools, memory, a real model."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.calls import limits
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import Run
from pygraph.runtime.host_copies import HostCopy
from tests.steps import refused_synchronizations

pytestmark = pytest.mark.gpu


@pytest.fixture
def driver() -> Iterator[Any]:
    driver: Any = driver_for(torch.device("cuda", torch.cuda.current_device()))
    before = allocated()
    yield driver
    assert allocated() <= before


def allocated() -> int:
    """Bytes of tensors on the GPU, without the workspaces that cuBLAS keeps per stream."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("variable", "value", "keeps"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
    ],
)
def test_allocators(variable: str, value: str, keeps: bool) -> None:
    """Graphs are recorded only where the allocator keeps their memory for them."""
    script = """if True:
        import torch, pygraph
        fn = pygraph.jit(lambda x: torch.sin(x) @ x + 1)
        kept = []
        for i in range(6):
            x = torch.randn(512, 512, device="cuda")
            kept.append((fn(x), torch.sin(x) @ x + 1))
            del x
            torch.cuda.empty_cache()
        for got, expected in kept:
            torch.testing.assert_close(got, expected)
        print(fn.cache_info().captures, "allocator" in str(fn.explain()))
    """
    environment = {**os.environ, variable: value}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == ("1 False" if keeps else "0 True"), done.stderr


def test_nodes_are_listed_in_the_order_of_capture(driver: Any) -> None:
    x = randn(64, 64)
    operations = [torch.sin, torch.exp, lambda t: t @ t, torch.relu, lambda t: t.sum(0, keepdim=True) + t, torch.tanh]

    def body(mark: Any) -> torch.Tensor:
        value = x
        for index, operation in enumerate(operations):
            mark(index)
            value = operation(value)
        return value

    driver.warm_up(lambda: body(lambda _: None))
    graph, _ = driver.record(body, driver.new_pool())
    ops = [node.op for node in graph.nodes]
    assert ops == sorted(ops)
    assert set(ops) == set(range(len(operations)))
    names = [node.name for node in graph.nodes]
    for part, op in (("sin", 0), ("exp", 1), ("tanh", 5)):
        assert any(part in name and node_op == op for name, node_op in zip(names, ops, strict=True))
    graph.release()


@pytest.mark.parametrize("kind", ["synchronise", "exception", "item"])
def test_a_failed_capture_leaves_everything_intact(driver: Any, kind: str) -> None:
    x = randn(32)
    torch.cuda.manual_seed(0)
    expected = [torch.rand(4, device="cuda") for _ in range(2)]
    pool = driver.new_pool()

    def body(mark: Any) -> torch.Tensor:
        mark(0)
        y = torch.sin(x) + torch.rand(32, device="cuda")
        mark(1)
        match kind:
            case "synchronise":
                torch.cuda.synchronize()
            case "item":
                y.sum().item()
            case _:
                raise KeyError("mine")
        return y

    torch.cuda.manual_seed(0)
    state = driver.random_state()
    with pytest.raises(Exception):  # noqa: B017, PT011  (CaptureError, or the body's own)
        driver.record(body, pool)
    driver.set_random_state(state)
    for values in expected:
        assert torch.equal(torch.rand(4, device="cuda"), values)
    for _ in range(2):
        graph, out = driver.record(lambda mark: (mark(0), torch.sin(x))[1], pool)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, torch.sin(x))
        del out
        graph.release()


def test_replay_on_another_stream(driver: Any) -> None:
    fn = pygraph.jit(lambda x: torch.sin(x) * 2 + 1)
    fn(randn(1 << 20))
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for n in range(12):
        stream = streams[n % 3]
        with torch.cuda.stream(stream):
            x = torch.full((1 << 20,), float(n), device="cuda")
            results.append((n, fn(x)))
    torch.cuda.synchronize()
    for n, result in results:
        torch.testing.assert_close(result, torch.sin(torch.full_like(result, float(n))) * 2 + 1)


def test_inside_a_users_capture_it_becomes_part_of_it(driver: Any) -> None:
    fn = pygraph.jit(lambda x: torch.sin(x) + 1)
    x = randn(16)
    fn(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = fn(x)
    x.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, torch.sin(x) + 1)
    del out, graph


def test_a_pool_says_how_much_it_holds(driver: Any) -> None:
    pool = driver.new_pool()
    before = pool.nbytes()
    x = randn(1 << 20)
    graph, out = driver.record(lambda mark: (mark(0), torch.sin(x))[1], pool)
    assert pool.nbytes() >= before + x.nbytes
    del out
    graph.release()


def test_inputs_freed_right_after_the_call(driver: Any) -> None:
    fn = pygraph.jit(lambda x: (torch.sin(x) @ x).relu())
    expected, results = [], []
    for n in range(20):
        x = randn(256, 256) + n
        expected.append((torch.sin(x) @ x).relu())
        results.append(fn(x))
        del x
        junk = torch.full((256, 256), float("nan"), device="cuda")  # takes the memory that was just freed
        del junk
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_a_transformer_copies_nothing(driver: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, dtype=torch.bfloat16)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda().eval()
    fast = pygraph.jit(model)
    with torch.no_grad():
        held = []
        for _ in range(3):
            x = randn(1, 128, 768, dtype=torch.bfloat16)
            held.append((fast(x), model(x)))
        for got, want in held:
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        report = fast.explain().to_dict()
    assert report["bytes_copied_per_replay"] == 0
    assert report["fallbacks"] == []
    assert fast.cache_info().captures == 1
    fast.cache_clear()


def test_memory_is_back_at_its_baseline_after_cache_clear(driver: Any) -> None:
    before = allocated()
    weight = randn(1024, 1024)
    fn = pygraph.jit(lambda x: torch.relu(x @ weight).softmax(-1))
    for n in (1, 2, 4):
        fn(randn(n, 1024))
    fn.cache_clear()
    assert allocated() <= before + weight.nbytes
    del fn
    weight = None
    assert allocated() <= before


def test_random_streams_are_those_of_eager(driver: Any) -> None:
    function = lambda x: nn.functional.dropout(x, 0.5) + torch.rand_like(x)  # noqa: E731
    fn = pygraph.jit(function)
    x = torch.ones(1000, device="cuda")
    outcomes = []
    for run in (fn, function):
        torch.manual_seed(3)
        outcomes.append([run(x) for _ in range(4)] + [torch.rand(4, device="cuda")])
    for got, want in zip(*outcomes, strict=True):
        assert torch.equal(got, want)


def test_a_driver_before_cuda_has_been_used() -> None:
    """Torch knows no statistics of memory before it has initialised CUDA."""
    code = """if True:
        import torch
        from pygraph.runtime.devices import driver_for
        driver = driver_for(torch.device("cuda", 0))
        assert not torch.cuda.is_initialized()
        assert driver.live_bytes() == driver.allocated_total() == 0
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_where_torch_refuses_synchronizations() -> None:
    """What they are searched for in is the user's code: calls, first ones as well, and what dies wait as they need."""
    x = torch.rand(64, 64, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x) + 1

    expected = [step(x[:size, :size]) for size in range(60, 65)]
    found: list[torch.Tensor] = []
    with refused_synchronizations():
        for size in range(60, 65):
            fast = pygraph.jit(step)
            for _ in range(3):
                result = fast(x[:size, :size])
            found.append(result)
            assert fast.cache_info().captures == 1, str(fast.explain())
            del fast
        gc.collect()  # an error of a finalizer would be one of this test
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_a_thousand_captures_and_evictions_leave_nothing_reserved() -> None:
    net = torch.nn.Linear(4, 4).cuda().requires_grad_(False)
    x = torch.ones(1024, 4, device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(net(x)) + x.sum(0)

    def cycle(captures: int) -> tuple[int, int]:
        fn = pygraph.graphify(pygraph.indirect(step), max_graphs=4)
        for n in range(1, captures + 1):
            for _ in range(limits.LIMITS.settled_calls):  # a cache that only turns over stops capturing
                fn(x[:n])
        assert fn.cache_info().captures == captures
        fn.cache_clear()
        del fn
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    before = cycle(8)  # libraries keep workspaces from their first use on
    after = cycle(1000)
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_donated_memory_of_another_stream_waits_for_the_call() -> None:
    """An argument allocated on a side stream is freed by the call; that stream must not write to it too early."""
    fn = pygraph.jit(lambda x: torch.stack([(x @ x).sum() for _ in range(20)]).cumsum(0), donate_argnums=0)
    side = torch.cuda.Stream()
    x = torch.eye(2048, device="cuda")
    expected = fn(x.clone())
    for _ in range(5):
        with torch.cuda.stream(side):
            mine = x.clone()
        torch.cuda.current_stream().wait_stream(side)
        result = fn(mine)
        with torch.cuda.stream(side):
            junk = [torch.full_like(x, float("nan")) for _ in range(3)]
        assert torch.equal(result, expected)
        torch.cuda.synchronize()
        del junk


def test_asking_for_a_pools_size_leaves_its_identifier_alone(driver: Any) -> None:
    """Regression: torch's snapshot of one pool drops references to the identifier, which then is freed while in use."""
    pool = driver.new_pool()
    identifier = pool.handle[1]
    before = sys.getrefcount(identifier)
    for _ in range(100):
        pool.nbytes()
    assert sys.getrefcount(identifier) == before


def test_a_captured_tensor_that_was_cloned_lazily() -> None:
    weight, x = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")

    @pygraph.jit
    def add() -> torch.Tensor:
        return weight.add_(x)

    for _ in range(3):
        add()
    clone = torch._lazy_clone(weight)  # shares the memory until one of the two is written
    add()
    assert (clone.tolist(), weight.tolist()) == ([3.0] * 4, [4.0] * 4)


def test_compiling_needs_no_more_memory_than_eager_and_a_pool() -> None:
    weight = torch.randn(256, 256, device="cuda")

    def fn(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.relu(x @ weight)
        return x.sum(0) @ weight

    def peak(run: Any, x: torch.Tensor) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        run(x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before

    x = torch.randn(1 << 16, 256, device="cuda")  # 64 MiB
    eager = peak(fn, x)
    assert eager >= 128 << 20
    assert peak(pygraph.jit(fn), x) <= 2.2 * eager


@pytest.mark.parametrize("which", ["linalg", "blas"])
def test_preferred_libraries_are_part_of_the_key(which: str) -> None:
    get, choose, values = {
        "linalg": (torch._C._get_linalg_preferred_backend, torch.backends.cuda.preferred_linalg_library,
                   ("cusolver", "default")),
        "blas": (torch._C._get_blas_preferred_backend, torch.backends.cuda.preferred_blas_library,
                 ("cublaslt", "cublas")),
    }[which]  # fmt: skip
    fn = pygraph.jit(lambda x: x @ x)
    x = torch.eye(16, device="cuda")
    before = get()
    try:
        for value in (*values, *values):
            choose(value)
            for _ in range(3):
                assert torch.equal(fn(x), x)
    finally:
        choose(before)
    assert fn.cache_info().misses == 2


def test_a_librarys_workspace_is_no_scratch_of_an_operation() -> None:
    """The memory behind a result that is watched is as large as what its operation frees, not as what it keeps."""
    weight = torch.randn(64, 64, device="cuda")
    x = torch.randn(8, 64, device="cuda")
    fn = pygraph.jit(lambda x: x @ weight)
    fn(x)
    graph = next(iter(fn.engine.cache.entries)).executable.graphs[0]
    assert all(memory.scratch < 1 << 20 for memory in graph.memory)


@pytest.mark.parametrize("start", [0, 64])
@pytest.mark.parametrize("order", [("apart", "alias"), ("alias", "apart")])
def test_the_same_memory_by_dlpack(start: int, order: tuple[str, ...]) -> None:
    """Another storage over the same addresses, through the path in Python and the native one."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        result = b * 2
        a.mul_(3)
        return result

    function = pygraph.jit(fn)
    for name in (*order, *order):
        for _ in range(4):
            results: list[torch.Tensor] = []
            for run in (fn, function):
                a, other = torch.arange(256.0, device="cuda"), torch.arange(256.0, device="cuda").flip(0)
                b = torch.from_dlpack((a if name == "alias" else other)[start : start + 128])
                assert b.untyped_storage()._cdata != a.untyped_storage()._cdata
                results += [run(a[:128], b), a]
            assert torch.equal(results[0], results[2])
            assert torch.equal(results[1], results[3])


# ---- measuring -------------------------------------------------------------------------------------------------


def test_what_prepares_a_run_is_not_measured(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the driver's own samples, not those of the other tests
    x = torch.zeros(8, device="cuda")
    long, short = (lambda: torch.cuda._sleep(40_000_000)), (lambda: x.add_(1))  # at least 20 ms, and some µs
    assert driver.sample(Run(short, long)).device < 10_000 < driver.sample(Run(long, short)).device
    count = torch.zeros(1, device="cuda")
    driver.sample(Run(lambda: count.add_(1), count.zero_))
    assert count.item() == 1


@pytest.mark.parametrize("first", [0, 7])
def test_measuring_stays_within_a_buffer(driver: Any, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.undo()
    buffer = torch.zeros(8, 4, device="cuda")
    position = torch.full((1,), first, device="cuda")

    @pygraph.jit
    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.index_copy_(0, position, x)
        position.add_(1)
        return buffer.sum(0)

    for index in range(first, 8):
        write(torch.full((1, 4), index + 1.0, device="cuda"))
    assert buffer[:, 0].tolist() == [index + 1.0 if index >= first else 0.0 for index in range(8)]
    assert position.item() == 8


def test_a_large_cache_is_copied_a_few_times(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gigabytes that no index depends on are put back after runs that are timed, not before each."""
    monkeypatch.undo()
    moved: list[str] = []
    for name in ("write", "on_device"):
        original = getattr(HostCopy, name)

        def move(self: HostCopy, *args: Any, name: str = name, original: Any = original) -> Any:
            if self.bytes.numel() >= 2**31:
                moved.append(name)
            return original(self, *args)

        monkeypatch.setattr(HostCopy, name, move)
    cache = torch.zeros(1 << 19, 1024, device="cuda")
    position = torch.zeros(1, dtype=torch.int64, device="cuda")

    def write(x: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, x)
        position.add_(1)
        return x + 1

    pygraph.jit(write)(randn(1, 1024))
    assert position.item() == 1
    assert len(moved) < 30, moved  # of hundreds of runs; ways that are close are looked at again
    monkeypatch.undo()
