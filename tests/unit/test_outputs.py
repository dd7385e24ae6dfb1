"""What a call returns and writes: views, aliases, arguments, ``out=``; always as in eager PyTorch."""

from __future__ import annotations

import dataclasses
import enum
import fractions
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import pygraph

WRAPS: dict[str, Callable[[Any], Any]] = {
    "jit": pygraph.jit,
    "patched": lambda fn: pygraph.graphify(pygraph.indirect(pygraph.devicify(fn))),
    "copied": lambda fn: pygraph.graphify(pygraph.devicify(fn)),
}


def ones(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), device=device).to(dtype).view(shape)


def sharing(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Which tensors share memory, and at which distance."""
    found: list[tuple[int, int]] = []
    for tensor in tensors:
        start = tensor.untyped_storage().data_ptr()
        first = next(i for i, other in enumerate(tensors) if other.untyped_storage().data_ptr() == start)
        found.append((first, tensor.data_ptr() - tensors[first].data_ptr()))
    return found


FUNCTIONS: dict[str, Callable[..., Any]] = {
    # out= given an argument
    "out": lambda x, y: torch.add(x, y, out=y),
    "out in place": lambda x, y: torch.mul(x, 2, out=x),
    "out of a matmul": lambda x, y: torch.mm(x, x, out=y),
    "out and more": lambda x, y: (torch.sin(x, out=y), y + 1, torch.cos(y)),
    "out to a view": lambda x, y: torch.add(x[0], 1, out=y[1]),
    "out read and written": lambda x, y: torch.sub(y, x, out=y).sum(),
    "out not returned": lambda x, y: (torch.exp(x, out=y), None)[1],
    "out twice": lambda x, y: (torch.add(x, 1, out=y), torch.add(y, 1, out=x)),
    "several outs": lambda x, y: torch.max(x, 0, out=(y[0], torch.empty(3, dtype=torch.long, device=x.device))),
    "out to a column": lambda x, y: torch.sum(x, 1, out=y[:, 1]),
    # in-place updates
    "updated": lambda x, y: x.add_(y),
    "updated through a view": lambda x, y: (x[1:].mul_(2), y)[1] + x,
    "both updated": lambda x, y: (x.copy_(y), y.zero_()),
    "updated and read before": lambda x, y: (x + 1, x.add_(1), x + 1),
    # outputs that are inputs, views of them, or share memory
    "the input": lambda x, y: x,
    "swapped": lambda x, y: (y, x),
    "views of an input": lambda x, y: (x[1:], x.t(), x.view(-1), x * y),
    "a view of an updated input": lambda x, y: (x.add_(1)[1:], x.t()),
    "views of one result": lambda x, y: ((z := x + y), z[1:], z.t(), z.view(-1)),
    "a result twice": lambda x, y: [(z := x * y), z],
    "parts of one result": lambda x, y: torch.chunk(x + y, 3),
    "an expanded result": lambda x, y: (x + y)[:1].expand(3, 3),
    "a result inside containers": lambda x, y: {"a": [x + y, {"b": (x - y,)}], "c": None, "d": 1},
    "nothing": lambda x, y: None,
    "empty": lambda x, y: (x[:0], x[:0] * 2, y),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_are_those_of_eager(device: torch.device, name: str, wrap: str) -> None:
    fn = FUNCTIONS[name]
    fast = WRAPS[wrap](fn)
    held: list[tuple[Any, Any]] = []
    for n in range(4):
        mine, eager = [[ones(device, 3, 3) + n, ones(device, 3, 3) * 2] for _ in range(2)]
        got, expected = fast(*mine), fn(*eager)
        check(got, expected, mine, eager)
        # Writing to a result shows wherever it does in eager.
        for result in (got, expected):
            for leaf in pytree.tree_leaves(result):
                if (
                    isinstance(leaf, torch.Tensor)
                    and leaf.numel()
                    and not leaf.is_inference()
                    and leaf.stride()[:1] != (0,)
                ):
                    leaf.mul_(2)
                    break
        check(got, expected, mine, eager)
        held.append((got, expected))
    for got, expected in held:
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def check(got: Any, expected: Any, mine: list[torch.Tensor], eager: list[torch.Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, check_stride=True)
    torch.testing.assert_close(mine, eager, rtol=0, atol=0)
    all_mine = [*mine, *(leaf for leaf in pytree.tree_leaves(got) if isinstance(leaf, torch.Tensor) and leaf.numel())]
    all_eager = [
        *eager, *(leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor) and leaf.numel())
    ]  # fmt: skip
    assert sharing(all_mine) == sharing(all_eager)
    same = [[a is b for b in all_mine] for a in all_mine]
    assert same == [[a is b for b in all_eager] for a in all_eager]


@pytest.mark.parametrize("wrap", WRAPS)
def test_out_of_another_dtype_or_shape(device: torch.device, wrap: str) -> None:
    """Results are cast to ``out``; one of a wrong shape raises or resizes as in eager."""
    fast = WRAPS[wrap](lambda x, out: torch.add(x, 1, out=out))
    for dtype in (torch.float32, torch.float64):
        x, out = ones(device, 3), torch.zeros(3, dtype=dtype, device=device)
        assert fast(x, out) is out
        assert torch.equal(out, ones(device, 3, dtype=dtype) + 1)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_result_as_out_of_the_next_call(device: torch.device, wrap: str) -> None:
    fast = WRAPS[wrap](lambda x, out: (torch.add(x, out, out=out), out * 2))
    x, out = ones(device, 3, 3), torch.zeros(3, 3, device=device)
    x_eager, out_eager = x.clone(), out.clone()
    for _ in range(4):
        out, x = fast(x, out)
        out_eager, x_eager = torch.add(x_eager, out_eager, out=out_eager), out_eager * 2
        torch.testing.assert_close((x, out), (x_eager, out_eager), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", WRAPS)
def test_out_that_overlaps_an_argument(device: torch.device, wrap: str) -> None:
    fn = lambda x, out: torch.mul(x, 3, out=out)  # noqa: E731
    fast = WRAPS[wrap](fn)
    for _ in range(3):
        mine, eager = ones(device, 3, 3), ones(device, 3, 3)
        assert torch.equal(fast(mine[0], mine[1]), fn(eager[0], eager[1]))
        assert torch.equal(mine, eager)
        assert torch.equal(fast(mine[0], mine[0]), fn(eager[0], eager[0]))
        assert torch.equal(mine, eager)


LAZY: dict[str, Callable[..., Any]] = {
    "conjugated": lambda z: (z * 2).conj(),
    "real inverse": lambda z: torch.fft.ifft(z.real),
    "negated": lambda z: (z * 2).conj().imag,
    "conjugated, as it is, and a part": lambda z: ((y := z * 2), y.conj(), y.conj()[1:]),
    "only parts": lambda z: ((y := (z * 2).conj())[1:], y[:1]),
    "one of several": lambda z: (z.real + 1, (z * 2).conj(), z * 3),
    "read again": lambda z: ((y := (z * 2).conj()), y * 2),
    "of an argument": lambda z: (z.conj(), z.conj()[1:], z.t(), z * 2),
    "of an updated argument": lambda z: (z.mul_(2).conj(), z + 1),
    "updated through it": lambda z: (z.conj().mul_(2j), z + 1),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("wrap", [*WRAPS, "reused"])
def test_results_that_are_conjugated_when_they_are_read(device: torch.device, wrap: str, name: str) -> None:
    fn = LAZY[name]
    fast: Any = pygraph.jit(fn, reuse_outputs=True) if wrap == "reused" else WRAPS[wrap](fn)
    for step in range(4):
        z = torch.complex(ones(device, 3, 7) + step, ones(device, 3, 7) - step)
        again = z.clone()
        got, expected = [z, *pytree.tree_leaves(fast(z))], [again, *pytree.tree_leaves(fn(again))]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg())
            assert a.is_conj() == b.is_conj()
        if wrap != "reused" and name != "negated":
            assert sharing(got) == sharing(expected)
    report = fast.explain().to_dict()
    assert report["kernels_in_graphs"] == report["kernels"] > 0, report["fallbacks"]


def test_a_conjugated_view_of_a_captured_tensor(device: torch.device) -> None:
    weight = torch.complex(ones(device, 3), ones(device, 3))
    fast = pygraph.jit(lambda x: (weight.conj(), weight, x * weight))
    for step in range(3):
        conjugated, same, product = fast(ones(device, 3) * step)
        assert same is weight
        assert conjugated.is_conj()
        assert conjugated.data_ptr() == weight.data_ptr()
        assert torch.equal(conjugated.resolve_conj(), weight.conj().resolve_conj())
        assert torch.equal(product, ones(device, 3) * step * weight)
    assert "conjugated view" in str(pygraph.trace(lambda x: (weight.conj(), x * 2))(ones(device, 3)))


# ---- what is returned besides tensors ---------------------------------------------------------------------------


class Box:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def method(self) -> None: ...


class ByValue(Box):
    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and other.value == self.value


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


class Color(enum.Enum):
    RED = 1


KNOWN = Box()
KNOWN_SET = {1}
KNOWN_ARRAY = np.zeros(2)


def counter() -> Callable[[], int]:
    count = 0

    def count_up() -> int:
        nonlocal count
        count += 1
        return count

    return count_up


NEW: dict[str, Callable[[torch.Tensor], Any]] = {
    "array": lambda x: np.zeros(2),
    "set": lambda x: {1, 2},
    "object": lambda x: Box(),
    "bytearray": lambda x: bytearray(b"ab"),
    "object that is hashed by value": lambda x: ByValue(1),
    "frozen dataclass of a list": lambda x: Frozen([1]),
    "frozen dataclass of a tensor": lambda x: Frozen(x * 2),
    "frozen set of tensors": lambda x: frozenset({x * 2}),
    "function with variables": lambda x: counter(),
    "function of a tensor": lambda x: lambda: x * 2,
    "method": lambda x: Box().method,
    "method of a tensor": lambda x: (x * 2).sum,
    "partial": lambda x: functools.partial(print, 1),
    "iterator": lambda x: iter([1, 2]),
    "exception": lambda x: ValueError(),
}

SAME: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda x: None,
    "string": lambda x: "a" + str(len(x.shape)),
    "number": lambda x: 2**70,
    "type": lambda x: Box,
    "function": lambda x: len,
    "function made anew": lambda x: lambda: 1,
    "module": lambda x: torch,
    "enum": lambda x: Color.RED,
    "dtype": lambda x: x.dtype,
    "layout": lambda x: x.layout,
    "NumPy number": lambda x: np.float32(2),
    "frozen set": lambda x: frozenset({1, (2, "a")}),
    "frozen dataclass": lambda x: Frozen((1, "a", Color.RED)),
    "fraction": lambda x: fractions.Fraction(1, 3),
    "ellipsis": lambda x: ...,
    "slice": lambda x: slice(1, 2),
    "object that was there": lambda x: KNOWN,
    "set that was there": lambda x: KNOWN_SET,
    "array that was there": lambda x: KNOWN_ARRAY,
    "method of what was there": lambda x: KNOWN.method,
}


@pytest.mark.parametrize("name", NEW)
def test_an_object_made_anew_is_not_shared_among_calls(device: torch.device, name: str, native: bool) -> None:
    fast = pygraph.jit(lambda x: (x * 2, NEW[name](x)))
    x = ones(device, 3)
    results = [fast(x)[1] for _ in range(4)]
    assert len({id(result) for result in results}) == 4
    assert type(results[-1]) is type(NEW[name](x))
    assert "that it makes anew" in str(fast.explain())


@pytest.mark.parametrize("name", SAME)
def test_an_object_that_cannot_change_or_was_there_is_returned(device: torch.device, name: str, native: bool) -> None:
    fn = SAME[name]
    fast = pygraph.jit(lambda x: (x * 2, fn(x)))
    x = ones(device, 3)
    for _ in range(4):
        got, expected = fast(x)[1], fn(x)
        assert type(got) is type(expected)
        assert got is expected or got == expected or name == "function made anew"
    assert not fast.explain().to_dict()["fallbacks"]


def test_an_object_among_the_arguments_is_returned(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, box: (x * 2, box, box.value))
    x, box = ones(device, 3), Box({1})
    for _ in range(4):
        got = fast(x, box)
        assert got[1] is box
        assert got[2] is box.value
    assert not fast.explain().to_dict()["fallbacks"]


def test_statistics_that_batch_norm_saves_are_those_of_the_device(device: torch.device) -> None:
    x, mean, var = (ones(device, *shape) for shape in ((4, 3), (3,), (3,)))

    def normalised(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.native_batch_norm(x, None, None, mean, var, False, 0.1, 1e-5)

    fast = pygraph.jit(normalised)
    for _ in range(2):
        for got, expected in zip(fast(x), normalised(x), strict=True):
            torch.testing.assert_close(got, expected)
    assert not fast.explain().to_dict()["fallbacks"]
