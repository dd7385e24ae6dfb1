"""Triton kernels for tests, and a way to compile them without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
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

KERNELS = SimpleNamespace(add=add, scale=scale, tuned=tuned, hooked=hooked)


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
