"""Traced numbers are of the type that the caller passed; those whose text is asked for are baked in."""

from __future__ import annotations

import collections.abc
import functools
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import pygraph


def helper(k: Any) -> float:
    return 3.0 if isinstance(k, float) else 5.0


@functools.singledispatch
def dispatched(k: Any) -> float:
    return 1.0


@dispatched.register
def _(k: float) -> float:
    return 2.0


@dispatched.register
def _(k: int) -> float:
    return 4.0


def matched(k: Any) -> float:
    match k:
        case float():
            return 2.0
        case int() | bool():
            return 4.0
    return 1.0


ASKING: dict[str, Callable[..., Any]] = {
    "isinstance": lambda x, k: x * k if isinstance(k, float) else x + k,
    "isinstance of several": lambda x, k: x * k if isinstance(k, (int, str)) else x + k,
    "isinstance of an abstract class": lambda x, k: x * k if isinstance(k, numbers.Integral) else x + k,
    "not an instance": lambda x, k: x * len(k) if isinstance(k, collections.abc.Sized) else x + k,
    "a helper": lambda x, k: x * helper(k),
    "over two lines": lambda x, k: (
        x * k
        if isinstance(
            k,
            float,
        )
        else x + k
    ),
    "in a comprehension": lambda x, k: sum([x * v if isinstance(v, float) else x + v for v in (k, k)]),
    "__class__": lambda x, k: x * k if k.__class__ is int else x + k,
    "match": lambda x, k: x * matched(k),
    "singledispatch": lambda x, k: x * dispatched(k),
}

TEXT: dict[str, Callable[..., Any]] = {
    "str": lambda x, k: x * float(str(k)),
    "repr": lambda x, k: x * len(repr(k)),
    "format": lambda x, k: x * float(f"{k:.1f}"),
    "f-string": lambda x, k: x * len(f"{k}"),
}

LIVE: dict[str, Callable[..., Any]] = {
    "multiply": lambda x, k: x * k,
    "beside a question": lambda x, k: x * k if isinstance(x, torch.Tensor) else x,
    "arithmetic": lambda x, k: x * (k * 2 + 1),
    "full": lambda x, k: torch.full((3,), k, device=x.device) + x,
    "tensor": lambda x, k: torch.tensor(k, device=x.device, dtype=torch.float32) + x,
    "clamp": lambda x, k: x.clamp(min=k),
    "addcmul": lambda x, k: torch.addcmul(x, x, x, value=k),
    "alpha": lambda x, k: torch.add(x, x, alpha=k),
    "threshold": lambda x, k: torch.nn.functional.threshold(x, k, k),
}


@pytest.mark.parametrize("kind", ASKING)
def test_a_number_has_the_type_that_was_passed(device: torch.device, kind: str) -> None:
    fn = ASKING[kind]
    for _ in range(30):  # Python specialises code that runs often
        fn(torch.ones(1), 1.5)
    jitted = pygraph.jit(fn)
    for k in (2.5, 3, 0.5, 7, 2.5, 3):
        x = torch.arange(3.0, device=device)
        assert torch.equal(jitted(x, k), fn(x, k)), k
    assert jitted.cache_info()[:2] == (4, 2)
    assert jitted.explain().to_dict()["fallbacks"] == []


def test_numpy_numbers_have_theirs(device: torch.device) -> None:
    def fn(x: torch.Tensor, k: Any) -> torch.Tensor:
        return x * 2 if isinstance(k, np.float32) else x * 3 if isinstance(k, float) else x + 1

    jitted = pygraph.jit(fn)
    x = torch.arange(3.0, device=device)
    for k in (np.float32(1.5), np.float64(1.5), 1.5, 2, np.int64(2)):
        assert torch.equal(jitted(x, k), fn(x, k)), type(k)


@pytest.mark.parametrize("kind", TEXT)
def test_a_number_whose_text_is_asked_for_is_baked_in(device: torch.device, kind: str) -> None:
    fn = TEXT[kind]
    jitted = pygraph.jit(fn)
    for k in (2.5, 3, 0.5, 7, 2.5, 3):
        x = torch.arange(3.0, device=device)
        assert torch.equal(jitted(x, k), fn(x, k)), k
    assert jitted.cache_info()[:2] == (2, 4)
    assert jitted.explain().to_dict()["fallbacks"] == []


@pytest.mark.parametrize("kind", LIVE)
def test_what_is_not_asked_stays_live(device: torch.device, kind: str) -> None:
    fn = LIVE[kind]
    jitted = pygraph.jit(fn)
    for k in (2.5, 3, 0.5, 7, -1.5, 4):
        x = torch.arange(3.0, device=device)
        assert torch.equal(jitted(x, k), fn(x, k)), k
    assert jitted.cache_info()[:2] == (4, 2)


WRITING: dict[str, Callable[..., Any]] = {
    "fill_": lambda x, k: x.clone().fill_(k),
    "masked_fill": lambda x, k: x.masked_fill(x > 1, k),
    "full_like": lambda x, k: torch.full_like(x, k),
    "index_fill": lambda x, k: x.index_fill(0, torch.tensor([1], device=x.device), k),
    "scatter": lambda x, k: x.scatter(0, torch.tensor([0], device=x.device), k),
    "index": lambda x, k: x.index_put((torch.tensor([0], device=x.device),), torch.full((), k, device=x.device).to(x)),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("kind", WRITING)
def test_a_float_that_integers_hold_loses_its_fraction(
    device: torch.device, kind: str, dtype: torch.dtype, native: bool
) -> None:
    fn = WRITING[kind]
    jitted = pygraph.jit(fn)
    x = torch.arange(3, device=device).to(dtype)
    for k in (2.5, 3.75, 0.5, 7.25, 2.5, 0.0):
        assert torch.equal(jitted(x, k), fn(x, k)), k
    assert jitted.explain().to_dict()["fallbacks"] == []


@pytest.mark.parametrize(
    ("fn", "sizes"),
    [
        (torch.constant_pad_nd, ([1, 2], [2, 1])), (torch.expand_copy, ([2, 3, 8], [4, 3, 8])), (torch.fft.fft, (6, 5)),
        (lambda x, n: torch.arange(n, device=x.device), (6, 5)),
    ],
    ids=["pad", "expand", "fft", "arange"],
)  # fmt: skip
def test_sizes_that_torch_takes_as_plain_integers_are_baked_in(device: torch.device, fn: Any, sizes: Any) -> None:
    jitted = pygraph.jit(fn, strict=True)
    x = torch.arange(24.0).view(3, 8).to(device)
    for size in (*sizes, *sizes):
        torch.testing.assert_close(jitted(x, size).cpu(), fn(x, size).cpu())
    assert jitted.cache_info()[:2] == (2, 2)


UNSENT = [torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", UNSENT)
@pytest.mark.parametrize("number", [0.7, 3], ids=["float", "int"])
def test_numbers_in_dtypes_that_no_kernel_takes_by_value(device: torch.device, dtype: torch.dtype, number: Any) -> None:
    jitted = pygraph.jit(torch.full_like)
    x = torch.ones(3, dtype=dtype).to(device)
    for k in (number, number + 1, number):
        assert torch.equal(jitted(x, k).cpu(), torch.full_like(x, k).cpu())
    assert jitted.cache_info()[:2] == (2, 1)
    assert jitted.explain().to_dict()["fallbacks"] == []


def test_a_sum_over_a_batch_adds_in_the_order_of_eager(device: torch.device) -> None:
    jitted = pygraph.jit(torch.addbmm)
    generator = torch.Generator().manual_seed(0)
    x, y = (10 * torch.randn(5, 5, 9, generator=generator).to(device) for _ in range(2))
    for beta in (1.0, 2.0):
        expected = torch.addbmm(x[0, :, :5], x, y.mT, beta=beta)
        assert torch.equal(jitted(x[0, :, :5], x, y.mT, beta=beta), expected)


def test_live_factors_of_complex_tensors(device: torch.device) -> None:
    jitted = pygraph.jit(torch.add)
    x = torch.randn(3, 3, dtype=torch.complex64).to(device)
    for alpha in (0.5, 1.5, -0.25):
        torch.testing.assert_close(jitted(x, x, alpha=alpha).cpu(), torch.add(x, x, alpha=alpha).cpu())
    assert jitted.cache_info().misses == 1


def test_numbers_of_16_bits_are_not_patched_where_nothing_widens_them(device: torch.device) -> None:
    def fill(x: torch.Tensor, k: float) -> torch.Tensor:
        return x + torch.ops.pygraph.scalar(k, dtype=torch.float16, device=device)

    jitted = pygraph.graphify(pygraph.indirect(fill))
    x = torch.ones(3, device=device)
    for k in (0.5, 1.5):
        assert torch.equal(jitted(x, k), x + k)


def test_only_the_number_that_is_asked_is_baked_in(device: torch.device) -> None:
    fn = lambda x, scale, shift: x * float(str(scale)) + shift  # noqa: E731
    jitted = pygraph.jit(fn)
    x = torch.arange(3.0, device=device)
    for shift in (1.5, 2.5, 3.5):
        for scale in (2.0, 3.0):
            assert torch.equal(jitted(x, scale, shift), fn(x, scale, shift))
    assert jitted.cache_info()[:2] == (4, 2)


@pytest.mark.parametrize(
    "number", [2.5, 3, np.float32(2.5), np.float64(2.5), np.int64(3)], ids=lambda n: type(n).__name__
)
def test_a_number_that_is_returned_is_the_one_that_was_passed(device: torch.device, number: Any) -> None:
    fn = pygraph.jit(lambda x, k: (x * k, k))
    x = torch.arange(3.0, device=device)
    for _ in range(4):
        product, k = fn(x, number)
        assert k is number
        assert torch.equal(product, x * number)
    assert fn.cache_info().misses == 1
    assert pygraph.evaluate(pygraph.trace(lambda x, k: k)(x, number), x, number) is number


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int8, np.int64])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, k: (x * (k * 3), k * 2),
        lambda x, k: (x, -k),
        lambda x, k: x / (k / 3),
        lambda x, k: (k + k, x * k),
        lambda x, k: (k, x + k),
        lambda x, k: k * x,
        lambda x, k: [np.sqrt(abs(k)), x],
    ],
)
def test_numbers_of_numpy_are_computed_with_by_numpy(device: torch.device, fn: Any, kind: Any) -> None:
    """In their own precision, with their own overflow, and returned as what they are."""
    fast = pygraph.jit(fn)
    x = torch.arange(4.0, device=device)
    with np.errstate(over="ignore"):
        for value in (2, 100, 2, 3):
            got, expected = pytree.tree_leaves(fast(x, kind(value))), pytree.tree_leaves(fn(x, kind(value)))
            for a, b in zip(got, expected, strict=True):
                assert type(a) is type(b)
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_number_of_numpy_is_live_where_tensors_are_computed_with_it(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, k: (x * k).clamp(max=k))
    x = torch.arange(4.0, device=device)
    for value in (1.5, 2.5, 3.5):
        assert torch.equal(fast(x, np.float32(value)), (x * value).clamp(max=value))
    assert fast.cache_info()[:2] == (2, 1)
