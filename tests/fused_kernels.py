"""Functions with a user's Triton kernel and custom operations, for tests of fusion."""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # their tests need a GPU, where triton is
    pass
else:

    @triton.jit
    def add_twice(x, y, out, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        tl.store(out + i, tl.load(x + i, mask=inside) + 2 * tl.load(y + i, mask=inside), mask=inside)


def with_triton(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_twice[(triton.cdiv(x.numel(), 256),)](x, y, out, x.numel(), 256)
    return torch.relu(out.sin()) * x


@torch.library.custom_op("pygraph_tests_fused::cosine", mutates_args=())
def cosine(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


@cosine.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pygraph_tests_fused::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


def with_operation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cosine(x * y + 1) * 2 + y


def with_updating_operation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * y + 1
    double(z)
    return z.sin() + 1
