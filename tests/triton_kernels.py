"""Triton kernels for tests, and a way to compile them without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics  # checked with torch 2.11 and 2.13
from torch._inductor.runtime.hints import DeviceProperties
from triton.backends.compiler import GPUTarget


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


@triton.jit
def scale(x, n, k, BLOCK: tl.constexpr = 64):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(x + at, tl.load(x + at, mask=mask) * k, mask=mask)


@triton.autotune(
    [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 96) for warps in (2, 4)], key=["n"]
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, out, n, k, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    lanes: tl.constexpr = 64
    for start in range(tl.program_id(0) * BLOCK, n, lanes):
        at = start + tl.arange(0, lanes)
        if EVEN:
            tl.store(out + at, tl.load(x + at) * k, mask=at < n)
        else:
            tl.store(out + at, tl.load(x + at, mask=at < n) * k, mask=at < n)


hooked = triton.autotune([triton.Config({"BLOCK": 64}, pre_hook=lambda args: args["out"].zero_())], key=[])(add)

unaligned = triton.jit(add.fn, do_not_specialize_on_alignment=["x", "y", "out"])


@triton.jit
def affine(x, bias, out, step, n, big, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    value = tl.load(x + at * step, mask=mask) * factor + (big >> 38).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + at, mask=mask)
    tl.store(out + at, value, mask=mask)


@triton.jit
def matmul(a, b, c, m, n, k, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        left = tl.load(a + rows[:, None] * k + start + inner[None, :])
        right = tl.load(b + (start + inner)[:, None] * n + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty))


@triton.jit
def count(x, totals, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.atomic_add(totals + tl.load(x + at, mask=mask, other=0) % 4, 1, mask=mask)


@triton.jit
def pair(xs, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(xs[0] + at) + tl.load(xs[1] + at))


def make_inductor_kernel() -> Any:
    """A kernel as Inductor writes them, which its autotuner has not compiled yet."""
    device = DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    )  # fmt: skip
    aligned = [["tt.divisibility", 16]]
    meta = {
        "signature": {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"},
        "device": device, "constants": {}, "configs": [{(0,): aligned, (1,): aligned, (2,): aligned}],
    }  # fmt: skip
    inductor_meta = {"grid_type": "Grid1D", "kernel_name": "triton_poi_relu", "mutated_arg_names": []}
    make = triton_heuristics.pointwise({"x": 4096}, meta, filename=__file__, inductor_meta=inductor_meta)
    return make(triton.jit(_relu))


def _relu(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + xindex, xmask)
    tl.store(out_ptr0 + xindex, triton_helpers.maximum(tmp0, 0.0), xmask)


KERNELS = SimpleNamespace(
    add=add, scale=scale, tuned=tuned, hooked=hooked, unaligned=unaligned, affine=affine, matmul=matmul, count=count,
    pair=pair,
)  # fmt: skip


class _CompileOnly:
    """What Triton asks its driver for in order to compile for an H200, without one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextlib.contextmanager
def compile_only() -> Generator[None, None, None]:
    """Let Triton compile for a GPU that is not there."""
    driver: Any = triton.runtime.driver
    if driver._active is not None:
        yield
        return
    driver.set_active(_CompileOnly())
    try:
        yield
    finally:
        driver._active = None
