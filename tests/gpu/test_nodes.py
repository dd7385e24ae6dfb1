"""Every kind of graph node and of kernel parameters: found, patched by each mechanism, or noticed and copied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph.ir.selections import MECHANISMS
from pygraph.runtime.driver import Costs

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from pygraph.runtime.cuda import costs as cuda_costs
    from pygraph.runtime.cuda.api import check, cu


def stream() -> Any:
    return cu.CUstream(torch.cuda.current_stream().cuda_stream)


def custom(name: str, implementation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """A custom operation of one tensor, with a result like it."""
    operation = torch.library.custom_op(
        f"pygraph_test::{name}", implementation, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operation.register_fake(lambda x: torch.empty_like(x))
    return operation


def memcpy(x: torch.Tensor, out: torch.Tensor, depth: int) -> Any:
    """The parameters of a copy of all but the last column of a matrix, or of a stack of ``depth`` of them."""
    params = cu.CUDA_MEMCPY3D()
    params.srcMemoryType = params.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.srcDevice, params.dstDevice = cu.CUdeviceptr(x.data_ptr()), cu.CUdeviceptr(out.data_ptr())
    rows, columns = x.shape[-2:]
    params.srcPitch = params.dstPitch = columns * x.element_size()
    params.srcHeight = params.dstHeight = rows
    params.WidthInBytes, params.Height, params.Depth = (columns - 1) * x.element_size(), rows, depth
    return params


def copy_2d(x: torch.Tensor) -> torch.Tensor:
    out = torch.ones_like(x)
    check((*cu.cuMemcpy3DAsync(memcpy(x, out, 1), stream()), None))
    return out


def copy_3d(x: torch.Tensor) -> torch.Tensor:
    stacked = x.reshape(2, x.shape[0] // 2, x.shape[1])
    out = torch.ones_like(stacked)
    check((*cu.cuMemcpy3DAsync(memcpy(stacked, out, 2), stream()), None))
    return out.reshape(x.shape)


def fill_2d(x: torch.Tensor) -> torch.Tensor:
    out = x * 2
    pitch = x.shape[1] * 4
    check((*cu.cuMemsetD2D32Async(cu.CUdeviceptr(out.data_ptr() + 8), pitch, 0x3F800000, 3, 5, stream()), None))
    return out


def fill(x: torch.Tensor) -> torch.Tensor:
    out = x * 2
    check((*cu.cuMemsetD32Async(cu.CUdeviceptr(out.data_ptr() + 16), 0x3F800000, 4, stream()), None))
    return out


_executables: list[Any] = []


def child(x: torch.Tensor) -> torch.Tensor:
    """Runs a graph of its own, which in a capture becomes a child graph."""
    out = torch.zeros_like(x)
    graph = check(cu.cuGraphCreate(0))
    context = check(cu.cuCtxGetCurrent())
    params = memcpy(x, out, 1)
    params.WidthInBytes = params.srcPitch = params.dstPitch = x.nbytes
    params.Height = 1
    check(cu.cuGraphAddMemcpyNode(graph, None, 0, params, context))
    values = check(cu.cuStreamGetCaptureInfo(stream()))
    if values[0] == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        before = list(values[3] or [])[: values[-1]]
        node = check(cu.cuGraphAddChildGraphNode(values[2], before or None, len(before), graph))
        flags = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        check((*cu.cuStreamUpdateCaptureDependencies(stream(), [node], None, 1, int(flags)), None))
        return out
    executable = check(cu.cuGraphInstantiate(graph, 0))
    _executables.append(executable)  # it must not go before it has run
    check((*cu.cuGraphLaunch(executable, stream()), None))
    return out


def forked(x: torch.Tensor) -> torch.Tensor:
    """Runs one half on another stream."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        first = torch.sin(x) * 2
    second = torch.cos(x) + 1
    here.wait_stream(side)
    first.record_stream(here)
    return first + second


def by_host_memory(x: torch.Tensor) -> torch.Tensor:
    """Passes a pointer through pinned host memory and device memory: no parameter holds it."""
    import triton
    import triton.language as tl

    host = torch.tensor([x.data_ptr()], dtype=torch.int64).pin_memory()
    _executables.append(host)
    table = host.to(x.device, non_blocking=True)
    out = torch.empty_like(x)
    _through_table(triton, tl)[(triton.cdiv(x.numel(), 256),)](table, out, x.numel(), 256)
    return out


_kernels: dict[str, Any] = {}


def _through_table(triton: Any, tl: Any) -> Any:
    if "kernel" not in _kernels:
        globals()["tl"] = tl

        @triton.jit
        def through_table(table, out, n, BLOCK: tl.constexpr):  # type: ignore
            pointer = tl.load(table).to(tl.pointer_type(tl.float32))
            index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + index, tl.load(pointer + index, index < n) + 1, index < n)

        _kernels["kernel"] = through_table
    return _kernels["kernel"]


@pytest.fixture(scope="module")
def operations() -> dict[str, Callable[[torch.Tensor], Any]]:
    return {
        "memcpy_2d": custom("copy_2d", copy_2d),
        "memcpy_3d": custom("copy_3d", copy_3d),
        "memset": custom("fill", fill),
        "memset_2d": custom("fill_2d", fill_2d),
        "child": custom("child", child),
        "streams": custom("forked", forked),
        "hidden": custom("hidden", by_host_memory),
    }


def run(fn: Callable[..., Any], make: Callable[[], tuple[torch.Tensor, ...]], mechanism: Any) -> dict[str, Any]:
    """Call a function on several address sets, with everything it was captured with poisoned; its report."""
    graph = pygraph.graphify(pygraph.indirect(fn, mechanism=mechanism))
    first = make()
    graph(*first)
    graph(*first)
    for tensor in first:
        tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()
    held = []
    for _ in range(3):
        arguments = make()
        held.append((graph(*arguments), fn(*arguments)))
    for got, wanted in held:
        torch.testing.assert_close(got, wanted)
    assert graph.cache_info().misses == 1
    return graph.explain().to_dict()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", ["memcpy_2d", "memcpy_3d", "memset", "memset_2d", "child", "streams"])
def test_kinds_of_nodes(name: str, mechanism: Any, operations: dict[str, Any]) -> None:
    operation = operations[name]
    report = run(lambda x: operation(x + 1) * 2, lambda: (torch.randn(64, 32, device="cuda"),), mechanism)
    assert report["kernels_in_graphs"] == report["kernels"] == 3, report["fallbacks"]
    report = run(lambda x: operation(x), lambda: (torch.randn(64, 32, device="cuda"),), mechanism)
    assert report["kernels_in_graphs"] == report["kernels"] == 1
    if mechanism != "copy":
        assert report["bytes_copied_per_replay"] == 0


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_pointer_in_host_memory_is_noticed(mechanism: Any, operations: dict[str, Any]) -> None:
    operation = operations["hidden"]
    make = lambda: (torch.randn(1000, device="cuda"),)  # noqa: E731
    report = run(lambda x: operation(x), make, mechanism)
    if report["kernels_in_graphs"]:
        assert report["bytes_copied_per_replay"] == 4000
        if mechanism != "copy":
            (reason,) = [f["reason"] for f in report["fallbacks"] if "copied" in f["what"]]
            assert "through_table" in reason


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


PARAMETERS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "struct of pointers": (lambda *xs: torch.cat(xs), lambda: tuple(randn(64, 8) for _ in range(6))),
    "views at offsets": (lambda x: x[3:5] * x[1:3], lambda: (randn(8, 8),)),
    "TMA descriptors": (
        lambda x, w: x @ w.t(),
        lambda: (randn(512, 1024, dtype=torch.bfloat16), randn(1024, 1024, dtype=torch.bfloat16)),
    ),
    "cuBLAS float32": (lambda x, w: x @ w, lambda: (randn(512, 1024), randn(1024, 512))),
    "lists of tensors": (
        lambda *xs: torch.stack(torch._foreach_norm(list(xs))),
        lambda: tuple(randn(1000) for _ in range(20)),
    ),
    "attention": (
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        lambda: tuple(randn(2, 8, 256, 64, dtype=torch.bfloat16) for _ in range(3)),
    ),
    "convolution": (lambda x, w: torch.conv2d(x, w, padding=1), lambda: (randn(4, 16, 32, 32), randn(16, 16, 3, 3))),
    "sort": (lambda x: torch.sort(x, -1)[0], lambda: (randn(64, 4096),)),
    "fft": (lambda x: torch.fft.rfft(x).abs(), lambda: (randn(64, 4096),)),
    "in place": (lambda x, y: (x.add_(y), x * 2)[1], lambda: (randn(1000), randn(1000))),
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", PARAMETERS)
def test_forms_of_parameters(name: str, mechanism: Any) -> None:
    fn, make = PARAMETERS[name]
    if name == "in place":
        fn = lambda x, y: (x := x.clone(), x.add_(y), x * 2)[2]  # noqa: E731
    report = run(fn, make, mechanism)
    assert report["kernels_in_graphs"] == report["kernels"] > 0
    if mechanism != "copy":
        assert report["bytes_copied_per_replay"] == 0, report["fallbacks"]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_arguments_updated_in_place(mechanism: Any) -> None:
    graph = pygraph.graphify(pygraph.indirect(lambda x, y: (x.add_(y), x * 2)[1], mechanism=mechanism))
    for _ in range(4):
        x, y = randn(1000), randn(1000)
        expected = x + y
        torch.testing.assert_close(graph(x, y), expected * 2)
        torch.testing.assert_close(x, expected)


def test_many_pointers_need_several_nodes() -> None:
    fn = lambda *xs: [x + 1 for x in xs]  # noqa: E731
    for mechanism in ("device", "copy"):
        report = run(lambda *xs: torch.stack(fn(*xs)), lambda: tuple(randn(16) for _ in range(600)), mechanism)
        assert report["kernels_in_graphs"] == report["kernels"]


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_copies_at_any_alignment(offset: int) -> None:
    fn = lambda x, y: x.float() + y.float()  # noqa: E731

    def make() -> tuple[torch.Tensor, ...]:
        flat = torch.randint(0, 100, (100_003,), device="cuda", dtype=torch.uint8)
        return flat[offset : offset + 99_991], randn(99_991)

    run(fn, make, "copy")


@pytest.fixture
def _costs_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path))
    cuda_costs._measured_costs.cache_clear()
    yield
    cuda_costs._measured_costs.cache_clear()


def test_costs_are_measured() -> None:
    costs = cuda_costs._measure(torch.device("cuda", 0))
    assert all(value >= 0 for value in vars(costs).values())
    assert costs.copy_rate > 1e4


@pytest.mark.parametrize("disturbed", ["", "nodes that take no time", "other processes"])
@pytest.mark.usefixtures("_costs_are_measured_anew")
def test_costs_are_measured_once_and_kept(disturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that other work has disturbed."""
    found = Costs(3.0, 0.2, 0.1 if "nodes" in disturbed else 2.0, 0.01, 2.0, 0.03, 2.0, 1e6, 1.0, 0.15)
    monkeypatch.setattr(cuda_costs, "busy_processes", lambda device: disturbed if "processes" in disturbed else None)
    measured: list[torch.device] = []
    monkeypatch.setattr(cuda_costs, "_measure", lambda device: measured.append(device) or found)
    for _ in range(2):
        assert cuda_costs.measured_costs(torch.device("cuda", 0)) == found
        cuda_costs._measured_costs.cache_clear()  # as another process
    assert len(measured) == (2 if disturbed else 1)
    assert [file.suffix for file in tmp_path.iterdir()] == ([] if disturbed else [".json"])


def test_memcpy_and_memset_structs_have_the_assumed_sizes() -> None:
    from pygraph.runtime.cuda import nodes as cuda_nodes

    params = cu.CUDA_MEMCPY3D()
    params.dstDevice, params.Depth = cu.CUdeviceptr(0x1122334455), 7
    raw = ctypes.string_at(int(params.getPtr()), cuda_nodes._MEMCPY_BYTES)
    assert int.from_bytes(raw[136:144], "little") == 0x1122334455
    assert int.from_bytes(raw[192:200], "little") == 7
