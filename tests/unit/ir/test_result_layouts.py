"""Results that the device lays out otherwise than PyTorch describes them, where kernels know the strides by heart."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import pygraph
from pygraph.errors import CaptureError
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.launches import Launch, register
from pygraph.ir.result_layouts import expected_layouts, in_layout
from pygraph.runtime.body import RegionBody


@torch.library.custom_op("test_result_layouts::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Doubles a matrix; in columns, which its description keeps quiet about."""
    return (x * 2).t().contiguous().t()


@torch.library.custom_op("test_result_layouts::two", mutates_args=())
def two(x: Tensor) -> tuple[Tensor, Tensor]:
    """One more than a matrix in rows, and twice as much in columns."""
    return x + 1, (x * 2).t().contiguous().t()


turned.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
two.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))


class Reader:
    """Stands in for a kernel that was told how a matrix lies in memory while the function was traced."""

    __name__ = "reader"

    def run(self, x: Tensor, out: Tensor, rows: int, columns: int, *, grid: Any, warmup: bool) -> None:
        out.copy_(x.as_strided(out.shape, (rows, columns)))


READER = Reader()


def read(x: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    strides = (("rows", "constant", x.stride(0)), ("columns", "constant", x.stride(1)))
    launch = Launch(READER, (("x", "read", 0), ("out", "written", 0), *strides), {}, (), {(): (1,)})  # pyright: ignore
    torch.ops.pygraph.launch(register(launch), [out], [x], [])
    return out


FUNCTIONS = {
    "a result": lambda x: read(turned(x)),
    "a result that is returned": lambda x: (read(y := turned(x)), y + 0, y),
    "one of two": lambda x: read(two(x)[1]),
    "a view": lambda x: read(turned(x)[1:].view(1, 3)),
    "in a later region": lambda x: (y := turned(x), x.sum().item(), read(y))[-1],
    "as described": lambda x: read(x * 2),
}


def batches(device: torch.device) -> list[Tensor]:
    return [torch.arange(6.0, device=device).view(2, 3) + number for number in range(3)]


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_kernels_read_results_in_the_strides_that_they_were_told(device: torch.device, kind: str) -> None:
    fast = pygraph.jit(FUNCTIONS[kind], strict=kind != "in a later region")
    for x in batches(device):
        torch.testing.assert_close(fast(x), FUNCTIONS[kind](x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [kind for kind in FUNCTIONS if kind != "in a later region"])
def test_ordinary_launches_have_the_same_layouts(device: torch.device, kind: str) -> None:
    batch = batches(device)
    body = RegionBody(pygraph.graphify(pygraph.indirect(pygraph.trace(FUNCTIONS[kind])(batch[0]))), 0)
    assert body.layouts
    for x in batch:
        wanted = FUNCTIONS[kind](x)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for mark in (None, lambda index: None):
            found = body.run([x], mark=mark)
            assert any(torch.equal(one, wanted[0]) for one in found)
            assert all(any(torch.equal(one, each) for each in wanted) for one in found)


@pytest.mark.parametrize("kind", [kind for kind in FUNCTIONS if kind != "in a later region"])
def test_a_program_that_is_evaluated_has_the_same_layouts(device: torch.device, kind: str) -> None:
    first, *others = batches(device)
    program = pygraph.trace(FUNCTIONS[kind])(first)
    for x in others:
        torch.testing.assert_close(program(x), FUNCTIONS[kind](x), rtol=0, atol=0)


def test_what_is_expected_of_results() -> None:
    """Kernels that read through views and selections; memory that is told its strides is not asked."""
    graph = fx.Graph()
    spec = TensorSpec((2, 3), (3, 1), torch.float32, torch.device("cpu"))

    def made(target: Any, *args: Any, spec: Any = spec) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["spec"] = spec
        return node

    x = graph.placeholder("x")
    told = made(torch.ops.aten.empty_strided.default, [2, 3], [3, 1])
    pair = made(torch.ops.aten.std_mean.correction, x, spec=(spec, spec))
    unread = made(torch.ops.aten.sin.default, x)
    turned = made(torch.ops.aten.cos.default, x)
    made(torch.ops.pygraph.reinterpret.default, made(torch.ops.aten.t.default, turned), [6], [1], 0)
    made(torch.ops.pygraph.launch.default, "kernel", [told], [x, made(operator.getitem, pair, 1), unread], [])
    assert expected_layouts(list(graph.nodes)) == {turned: spec, pair: (None, spec), unread: spec}


def test_values_that_are_no_tensors_and_dimensions_of_one_element_stay() -> None:
    spec = TensorSpec((2, 1), (1, 1), torch.float32, torch.device("cpu"))
    one = torch.ones(1, 2).t()[:, :1].as_strided((2, 1), (1, 7))
    found = in_layout([one, 3, None], (spec, None, None))
    assert found[0] is one
    assert found[1:] == (3, None)
    with pytest.raises(CaptureError, match=r"of shape \(3, 1\), which PyTorch describes as \(2, 1\)"):
        in_layout(torch.ones(3, 1), spec)
    assert in_layout(torch.ones(0, 3), TensorSpec((0, 3), (1, 9), torch.float32, spec.device)).stride() == (3, 1)
