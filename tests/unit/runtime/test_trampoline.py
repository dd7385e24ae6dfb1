"""Trampolines, as far as they can be tested without a GPU: compiled for one that is not there."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.runtime.launched_kernels import kernel_of, launched_kernels, register
from pygraph.runtime.trampoline import (
    Refused,
    compile_trampoline,
    parameter_sizes,
    runtime_parameters,
    trampoline_text,
)

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[SimpleNamespace]:
    from tests.triton_kernels import KERNELS, compile_only

    with compile_only():
        yield KERNELS


def compiled(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """What a launch with such arguments compiles; dtypes stand for aligned tensors."""
    return kernel.warmup(*args, grid=(1,), **kwargs)


def test_the_text_loads_casts_and_keeps_the_alignment(kernels: Any) -> None:
    kernel = compiled(kernels.add, torch.float32, torch.float32, torch.float32, 100, BLOCK=64)
    assert runtime_parameters(kernel) == ["x", "y", "out", "n"]
    assert trampoline_text(kernel.src, ["x", "out"], {"x"}) == (
        "def add_trampoline(x, y, out, n, BLOCK):\n"
        "    x_loaded = tl.multiple_of(tl.load(x).to(tl.pointer_type(tl.float32)), [16])\n"
        "    out_loaded = tl.load(out).to(tl.pointer_type(tl.float32))\n"
        "    pygraph_kernel(x_loaded, y, out_loaded, n, BLOCK)\n"
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]
)
def test_parameters_stay_where_they_are(dtype: torch.dtype, kernels: Any) -> None:
    kernel = compiled(kernels.add, dtype, dtype, dtype, 100, BLOCK=256, num_warps=2)
    for indirect in ([0], [0, 1, 2], []):
        built = compile_trampoline(kernel, indirect)
        assert parameter_sizes(built) == parameter_sizes(kernel)
        assert len(parameter_sizes(kernel) or []) == 6  # two hidden ones
        assert built.metadata.num_warps == 2


def widest(kernel: Any) -> int:
    """Bits of the widest global access in the PTX."""
    found = re.findall(r"(?:ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bf](\d+) ", kernel.asm["ptx"])
    return max(int(count or 1) * int(bits) for count, bits in found)


def test_wide_loads_stay_wide_and_only_where_the_kernel_had_them(kernels: Any) -> None:
    args = (torch.float32, torch.float32, torch.float32)
    kernel = compiled(kernels.add, *args, 4096, BLOCK=1024)
    assert widest(kernel) == 128
    assert widest(compile_trampoline(kernel, [0, 1, 2])) == 128
    unaligned = compiled(kernels.unaligned, *args, 4096, BLOCK=1024)
    assert widest(unaligned) == 32
    assert widest(compile_trampoline(unaligned, [0, 1, 2])) <= 64  # the table's entries themselves


def test_constants_none_and_ones_are_no_parameters(kernels: Any) -> None:
    kernel = compiled(kernels.affine, torch.float32, None, torch.float32, 1, 8, 2**40, 0.5, BLOCK=64)
    assert runtime_parameters(kernel) == ["x", "out", "n", "big", "factor"]
    built = compile_trampoline(kernel, [0, 1])
    assert parameter_sizes(built) == parameter_sizes(kernel)


def test_an_autotuned_matmul_and_atomics(kernels: Any) -> None:
    kernel = compiled(
        kernels.matmul,
        torch.bfloat16,
        torch.bfloat16,
        torch.bfloat16,
        256,
        256,
        256,
        BLOCK=64,
        num_warps=8,
        num_stages=3,
    )
    built = compile_trampoline(kernel, [0, 1, 2])
    assert (built.metadata.num_warps, built.metadata.num_stages) == (8, 3)
    assert built.metadata.shared == kernel.metadata.shared
    kernel = compiled(kernels.count, torch.int32, torch.int32, 100, BLOCK=64)
    assert parameter_sizes(compile_trampoline(kernel, [1])) == parameter_sizes(kernel)


def test_what_is_no_pointer_is_an_error(kernels: Any) -> None:
    kernel = compiled(kernels.add, torch.float32, torch.float32, torch.float32, 100, BLOCK=64)
    for position in (3, 4, -1):
        with pytest.raises(ValueError, match="no pointer"):
            compile_trampoline(kernel, [position])


def test_what_has_no_trampoline_says_why(kernels: Any) -> None:
    args = (torch.float32, torch.float32, torch.float32, 100)
    cluster = compiled(kernels.add, *args, BLOCK=64, num_ctas=2)
    assert compile_trampoline(cluster, [0]) == Refused("it is launched in clusters")
    cooperative = compiled(kernels.add, *args, BLOCK=64, launch_cooperative_grid=True)
    assert "cooperative" in compile_trampoline(cooperative, [0]).reason
    from triton.runtime.jit import MockTensor

    in_pairs = compiled(kernels.pair, (MockTensor(torch.float32), MockTensor(torch.float32)), torch.float32, BLOCK=64)
    assert "tuples" in compile_trampoline(in_pairs, [0]).reason


def test_kernels_are_known_by_their_handle_while_they_live(kernels: Any) -> None:
    class Kernel:
        function = 12345

    kernel = Kernel()
    register(kernel)
    assert kernel_of(12345) is kernel
    assert kernel_of(54321) is None
    del kernel
    gc.collect()
    assert kernel_of(12345) is None


def test_recording_puts_the_launcher_back(kernels: Any) -> None:
    run = type(kernels.add).run
    with launched_kernels():
        assert type(kernels.add).run is not run
    assert type(kernels.add).run is run
