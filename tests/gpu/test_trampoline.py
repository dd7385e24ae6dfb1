"""Trampolines on the GPU: the same results through a table of pointers, also after the table has changed."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from pygraph.runtime.launched_kernels import kernel_of, launched_kernels
from pygraph.runtime.trampoline import Trampoline, runtime_parameters, trampoline

pytestmark = pytest.mark.gpu

_TYPES = {"i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
_TYPES |= {"u8": ctypes.c_uint8, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64}
_TYPES |= {"fp32": ctypes.c_float, "fp64": ctypes.c_double}


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    from tests.triton_kernels import KERNELS

    return KERNELS


def layout(function: int) -> list[tuple[int, int]]:
    """Offset and size of each parameter of a kernel, hidden ones included."""
    from pygraph.runtime.cuda.driver import cu

    found: list[tuple[int, int]] = []
    while True:
        error, *place = cu.cuFuncGetParamInfo(cu.CUfunction(function), len(found))
        if error != cu.CUresult.CUDA_SUCCESS:
            return found
        found.append((place[0], place[1]))


def launch(built: Trampoline, kernel: Any, grid: tuple[int, ...], values: dict[str, Any], table: torch.Tensor) -> None:
    """Launch a trampoline; entry number ``i`` of the table stands for its parameter number ``i``."""
    from pygraph.runtime.cuda.driver import cu

    words: list[Any] = []
    for position, name in enumerate(runtime_parameters(kernel)):
        value, kind = values[name], kernel.src.signature[name]
        if position in built.indirect:
            words.append(ctypes.c_uint64(table.data_ptr() + 8 * position))
        elif isinstance(value, torch.Tensor):
            words.append(ctypes.c_uint64(value.data_ptr()))
        else:
            words.append(_TYPES[kind](value))
    words += [ctypes.c_uint64(0)] * (
        len(layout(built.function)) - len(words)
    )  # scratch memory, which none of them uses
    pointers = (ctypes.c_void_p * len(words))(*[ctypes.addressof(word) for word in words])
    stream = cu.CUstream(torch.cuda.current_stream().cuda_stream)
    (error,) = cu.cuLaunchKernel(
        cu.CUfunction(built.function),
        *(*grid, 1, 1)[:3],
        *built.block,
        built.shared,
        stream,
        ctypes.addressof(pointers),
        0,
    )
    assert error == cu.CUresult.CUDA_SUCCESS, error
    torch.cuda.synchronize()


def vectors(dtype: torch.dtype = torch.float32, n: int = 4096) -> dict[str, Any]:
    x, y = (torch.randn(n, device="cuda").to(dtype) for _ in range(2))
    return {"x": x, "y": y, "out": torch.zeros_like(x), "n": n}


def masked() -> dict[str, Any]:
    return {**vectors(n=1000), "n": 777}


def halves_of_one_buffer() -> dict[str, Any]:
    whole = torch.randn(3 * 1024, device="cuda")
    return {"x": whole[:1024], "y": whole[1024:2048], "out": whole[2048:], "n": 1024}


def not_aligned() -> dict[str, Any]:
    whole = torch.randn(3, 1027, device="cuda")
    return {"x": whole[0, 1:1025], "y": whole[1, 2:1026], "out": whole[2, 1:1025], "n": 1024}


def matrices() -> dict[str, Any]:
    a, b = (torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2))
    return {"a": a, "b": b, "c": torch.zeros_like(a), "m": 256, "n": 256, "k": 256}


def numbers(step: int, bias: bool) -> dict[str, Any]:
    x = torch.randn(4096, device="cuda")
    optional = torch.randn(1000, device="cuda") if bias else None
    out = torch.zeros(1000, device="cuda")
    return {"x": x, "bias": optional, "out": out, "step": step, "n": 1000, "big": 2**40, "factor": 0.7}


def counted() -> dict[str, Any]:
    x = torch.randint(0, 100, (5000,), device="cuda", dtype=torch.int32)
    return {"x": x, "totals": torch.zeros(4, device="cuda", dtype=torch.int32), "n": 5000}


CASES: dict[str, tuple[str, Any, dict[str, Any], tuple[int, ...]]] = {
    "add": ("add", vectors, {"BLOCK": 1024}, (4,)),
    "add, bf16": ("add", lambda: vectors(torch.bfloat16), {"BLOCK": 1024, "num_warps": 2}, (4,)),
    "add, masked": ("add", masked, {"BLOCK": 128}, (7,)),
    "one buffer": ("add", halves_of_one_buffer, {"BLOCK": 256}, (4,)),
    "not aligned": ("add", not_aligned, {"BLOCK": 256}, (4,)),
    "matmul": ("matmul", matrices, {"BLOCK": 64, "num_warps": 8, "num_stages": 3}, (4, 4)),
    "numbers": ("affine", lambda: numbers(2, True), {"BLOCK": 128}, (8,)),
    "None and one": ("affine", lambda: numbers(1, False), {"BLOCK": 128}, (8,)),
    "atomics": ("count", counted, {"BLOCK": 256}, (20,)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trampoline_is_the_kernel(name: str, kernels: Any) -> None:
    which, make, options, grid = CASES[name]
    kernel = getattr(kernels, which)
    values = make()
    fresh = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    if name in ("one buffer", "not aligned"):
        fresh = make()
    with launched_kernels():
        compiled = kernel[grid](**values, **options)
    assert kernel_of(compiled.function) is compiled
    pointers = [i for i, key in enumerate(runtime_parameters(compiled)) if isinstance(values[key], torch.Tensor)]
    for indirect in ([pointers[0]], [pointers[-1]], pointers):
        built = trampoline(compiled, indirect)
        assert isinstance(built, Trampoline), built
        assert trampoline(compiled, indirect) is built
        assert layout(built.function) == layout(compiled.function)
        table = torch.zeros(len(runtime_parameters(compiled)), dtype=torch.int64, device="cuda")
        for tensors in (values, fresh, values):  # the same kernel with other entries in the table
            ours, theirs = dict(tensors), dict(tensors)
            last = runtime_parameters(compiled)[pointers[-1]]
            ours[last], theirs[last] = fresh_like(tensors[last]), fresh_like(tensors[last])
            for position, key in enumerate(runtime_parameters(compiled)):
                if isinstance(ours[key], torch.Tensor):
                    table[position] = ours[key].data_ptr()
            kernel[grid](**theirs, **options)
            launch(built, compiled, grid, ours, table)
            torch.testing.assert_close(ours[last], theirs[last], rtol=0, atol=0)


def fresh_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros elsewhere, at an address that is as much aligned."""
    shift = tensor.data_ptr() % 16 // tensor.element_size()
    flat = torch.zeros(tensor.numel() + shift, dtype=tensor.dtype, device=tensor.device)
    return flat[shift:].view(tensor.shape)


def test_what_the_autotuner_chose_has_a_trampoline(kernels: Any) -> None:
    x = torch.randn(1000, device="cuda")
    values = {"x": x, "out": torch.zeros_like(x), "n": 1000, "k": 2.5}

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (-(-meta["n"] // meta["BLOCK"]),)

    compiled = kernels.tuned[grid](*values.values())
    built = trampoline(compiled, [0, 1])
    assert isinstance(built, Trampoline), built
    expected = values["out"].clone()
    values["out"].zero_()
    table = torch.tensor([x.data_ptr(), values["out"].data_ptr(), 0, 0], device="cuda")
    block = kernels.tuned.best_config.kwargs["BLOCK"]
    launch(built, compiled, grid({"n": 1000, "BLOCK": block}), values, table)
    torch.testing.assert_close(values["out"], expected, rtol=0, atol=0)


def test_a_captured_node_has_the_handle_of_its_kernel(kernels: Any) -> None:
    from pygraph.runtime.cuda.driver import cu

    values = vectors()
    kernels.add[(4,)](**values, BLOCK=1024)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with launched_kernels(), torch.cuda.graph(graph):
        compiled = kernels.add[(4,)](**values, BLOCK=1024)
    raw = cu.CUgraph(graph.raw_cuda_graph())
    _, nodes, count = cu.cuGraphGetNodes(raw, 1)
    assert count == 1
    _, params = cu.cuGraphKernelNodeGetParams(nodes[0])
    assert kernel_of(int(params.func)) is compiled
