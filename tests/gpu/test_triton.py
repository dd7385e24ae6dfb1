"""Triton kernels of the user in a jitted function: launched directly, in operations, autotuned, in loops, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import pygraph
from pygraph.ir.selections import MECHANISMS, Mechanism

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    from tests.triton_kernels import KERNELS

    return KERNELS


def blocks(meta: dict[str, Any]) -> tuple[int, ...]:
    return (-(-meta["n"] // meta["BLOCK"]),)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def check(fn: Callable[..., Any], make: Callable[[], tuple[Any, ...]], **options: Any) -> Any:
    """Compare with eager on several sets of buffers, with those of earlier calls poisoned, and results kept."""
    fast = pygraph.jit(fn, **options)
    used: list[Any] = []
    kept: list[tuple[Any, Any]] = []
    for _ in range(5):
        ours = make()
        theirs = pytree.tree_map_only(Tensor, torch.clone, ours)
        got, expected = fast(*ours), fn(*theirs)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(ours, theirs)
        kept.append((got, expected))
        used.append(ours)
        for tensor in ours:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    for got, expected in kept:
        torch.testing.assert_close(got, expected)
    assert fast.cache_info().misses == 1
    return fast


def assert_all_in_graphs(fast: Any) -> None:
    report = fast.explain().to_dict()
    assert report["fallbacks"] == [], str(fast.explain())
    assert report["kernels"] == report["kernels_in_graphs"] > 0, str(fast.explain())
    assert report["patched_nodes"] > 0, str(fast.explain())
    assert report["bytes_copied_per_replay"] == 0, str(fast.explain())


def vectors(n: int = 4096) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (randn(n), randn(n))


def test_a_direct_launch(kernels: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.add[blocks](x, y, out, x.numel(), BLOCK=256)
        return out * 2

    assert_all_in_graphs(check(fn, vectors(), strict=True))


def test_the_result_is_what_the_kernel_wrote(kernels: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.add[blocks](x, y, out, x.numel(), BLOCK=256)
        return out

    assert_all_in_graphs(check(fn, vectors(), strict=True))


def test_wrap_triton_outside_an_operation(kernels: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(kernels.add)[blocks](x, y, out, x.numel(), BLOCK=256)
        return out

    assert_all_in_graphs(check(fn, vectors(), strict=True))


def test_a_triton_op(kernels: Any) -> None:
    @torch.library.triton_op("test_triton::add", mutates_args={})
    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(kernels.add)[blocks](x, y, out, x.numel(), BLOCK=256)
        return out

    assert_all_in_graphs(check(lambda x, y: add(x, y).sin(), vectors(), strict=True))


def test_a_triton_op_that_writes_to_its_argument(kernels: Any) -> None:
    @torch.library.triton_op("test_triton::add_to", mutates_args={"out"})
    def add_to(x: Tensor, y: Tensor, out: Tensor) -> None:
        torch.library.wrap_triton(kernels.add)[blocks](x, y, out, x.numel(), BLOCK=256)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        add_to(x, y, out)
        return out + 1

    assert_all_in_graphs(check(fn, vectors(), strict=True))


def test_a_custom_op_that_writes_to_its_argument(kernels: Any) -> None:
    @torch.library.custom_op("test_triton::scale_", mutates_args={"x"})
    def scale_(x: Tensor, k: float) -> None:
        kernels.scale[blocks](x, x.numel(), k, BLOCK=256)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        before = x.clone()
        scale_(x, 0.5)
        scale_(y, 2.0)
        return before + y

    assert_all_in_graphs(check(fn, vectors(), strict=True))


def test_a_launch_that_writes_to_its_argument(kernels: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> None:
        kernels.scale[blocks](x, x.numel(), 0.5, BLOCK=256)
        kernels.add[blocks](x, y, x, x.numel(), BLOCK=256)

    assert_all_in_graphs(check(fn, vectors(), strict=True))


def test_an_autotuned_kernel_with_heuristics(kernels: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.tuned[blocks](x, out, x.numel(), 2.0)
        return out + y

    assert_all_in_graphs(check(fn, vectors(1000), strict=True))


def test_a_loop_of_launches(kernels: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        total = y.clone()
        for _ in range(5):
            kernels.add[blocks](total, x, total, x.numel(), BLOCK=256)
            x = x.sin()
        return total

    assert_all_in_graphs(check(fn, vectors(), strict=True))


def test_views_of_one_buffer(kernels: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        kernels.add[blocks](x[:1024], x[1024:2048], x[2048:], 1024, BLOCK=256)
        return x.sum()

    check(fn, lambda: (randn(3072),))


def test_atomics_into_zeros(kernels: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        totals = torch.zeros(4, dtype=torch.int32, device=x.device)
        kernels.count[blocks](x, totals, x.numel(), BLOCK=256)
        return totals

    def make() -> tuple[Tensor]:
        return (torch.randint(0, 100, (5000,), device="cuda", dtype=torch.int32),)

    assert_all_in_graphs(check(fn, make, strict=True))


def test_a_matmul_and_torch_operations_around_it(kernels: Any) -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        left, right = a.bfloat16(), b.bfloat16()
        out = torch.empty_like(left)
        kernels.matmul[(4, 4)](left, right, out, 256, 256, 256, BLOCK=64, num_warps=8)
        return torch.relu(out).float()

    assert_all_in_graphs(check(fn, lambda: (randn(256, 256), randn(256, 256)), strict=True))


def test_a_number_that_changes(kernels: Any) -> None:
    def fn(x: Tensor, k: float) -> Tensor:
        out = x.clone()
        kernels.scale[blocks](out, x.numel(), k, BLOCK=256)
        return out

    fast = pygraph.jit(fn)
    for k in (0.5, 1.5, 2.5, 0.5):
        x = randn(1000)
        torch.testing.assert_close(fast(x, k), x * k)


def test_what_is_refused_runs_as_it_is_and_says_so(kernels: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        kernels.pair[(1,)]((x[:64], x[64:128]), x[128:], BLOCK=64)
        return x

    fast = pygraph.jit(fn)
    x = randn(192)
    expected = x[:64] + x[64:128]
    torch.testing.assert_close(fast(x)[128:], expected)
    assert "passes a tuple" in str(fast.explain())


def test_gradients_through_a_kernel(kernels: Any) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
            out = torch.empty_like(x)
            kernels.add[blocks](x, x, out, x.numel(), BLOCK=256)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
            out = torch.empty_like(grad)
            kernels.add[blocks](grad, grad, out, grad.numel(), BLOCK=256)
            return out

    def fn(x: Tensor, y: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((Double.apply(leaf) * y).sum(), leaf)
        return gradient

    check(fn, vectors())


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_mechanism(kernels: Any, mechanism: Mechanism) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernels.add[blocks](x, y, out, x.numel(), BLOCK=256)
        return out

    fast = pygraph.graphify(pygraph.indirect(fn, mechanism=mechanism))
    used: list[Tensor] = []
    for _ in range(5):
        x, y = vectors()()
        expected = x + y
        torch.testing.assert_close(fast(x, y), expected)
        for tensor in (x, y):
            tensor.fill_(float("nan"))
        used += [x, y]  # so that the next call's are elsewhere
    report = fast.explain().to_dict()
    assert report["kernels_in_graphs"] == report["kernels"] > 0
    if mechanism != "auto":
        assert report["mechanisms"][mechanism] > 0, report["fallbacks"]
