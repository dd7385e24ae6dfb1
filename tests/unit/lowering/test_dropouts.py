"""Dropouts as masks and products: the graphs, as they would be for a GPU, and what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import pygraph
from pygraph.ir import dropout_masks
from pygraph.ir.dropout_masks import DROPOUT_MASK
from pygraph.lowering.draws import prepare_aot_draws, prepare_program_draws
from pygraph.runtime.indices import Reach, index_reach
from tests.unit.transforms.test_fusable_run import program_on_cuda

aten = torch.ops.aten


def graph_of(fn: Any, *tensors: torch.Tensor, symbolic: bool = False) -> fx.GraphModule:
    """The graph of a function of tensors like these on a GPU, which need not be there."""
    with FakeTensorMode() as mode:
        fakes = [
            torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device="cuda").as_strided(
                x.shape, x.stride(), x.storage_offset()
            )
            for x in tensors
        ]
    del mode
    return make_fx(fn, tracing_mode="symbolic" if symbolic else "real")(*fakes)


def on_the_host(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph for tensors of the host."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.pygraph.dropout_mask.default):
        size, stride, dtype, _, p, after = node.args
        node.args = (size, stride, dtype, torch.device("cpu"), p, after)
    module.recompile()
    return module


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def two(x: torch.Tensor, y: torch.Tensor) -> Any:
    first = aten.native_dropout(x, 0.1, True)
    second = aten.native_dropout(y, 0.3, True)
    return first[0] * 2, first[1], second[0].exp(), second[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_those_of_dropouts(dtype: torch.dtype) -> None:
    args = torch.randn(8, 12).to(dtype), torch.randn(12, 5).to(dtype).t()
    module = graph_of(two, *args)
    prepare_aot_draws(module.graph)
    assert "aten.native_dropout.default" not in targets(module)
    torch.manual_seed(3)
    wanted = two(*args)
    torch.manual_seed(3)
    torch.testing.assert_close(
        on_the_host(module)(*args), wanted, rtol=0.02 if dtype != torch.float32 else 1e-6, atol=0
    )
    assert [x.stride() for x in wanted] == [x.stride() for x in module(*args)]


def test_masks_are_drawn_in_order() -> None:
    module = graph_of(two, torch.ones(3, 4), torch.ones(2, 2))
    prepare_aot_draws(module.graph)
    first, second = module.graph.find_nodes(op="call_function", target=torch.ops.pygraph.dropout_mask.default)
    assert (first.args[-1], second.args[-1]) == (None, first)
    assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x: aten.native_dropout(x, 0.0, True)[0], torch.ones(3, 4)),
        (lambda x: aten.native_dropout(x, 1.0, True)[0], torch.ones(3, 4)),
        (lambda x: aten.native_dropout(x, 0.5, False)[0], torch.ones(3, 4)),
        (lambda x: aten.native_dropout(x, 0.5, True)[0], torch.ones(3, 4, dtype=torch.float64)),
        (lambda x: aten.native_dropout(x, 0.5, True)[0], torch.ones(6, 4)[::2]),
        (lambda x: aten.native_dropout(x, 0.5, True)[0], torch.ones(0, 4)),
        (lambda x: aten.native_dropout(x, 0.5, True)[0], torch.ones(9)[1:]),
    ],
)
def test_other_dropouts_stay(fn: Any, x: torch.Tensor) -> None:
    module = graph_of(fn, x)
    before = targets(module)
    prepare_aot_draws(module.graph)
    assert targets(module) == before


def test_recordings_find_out_which_nodes_draw_masks() -> None:
    count = 0

    def nodes() -> int:
        nonlocal count
        count += 5
        return count

    cpu = torch.device("cpu")
    with dropout_masks.noted(nodes) as spans:
        for _ in range(2):
            torch.ops.pygraph.dropout_mask([2, 3], [3, 1], torch.float32, cpu, 0.5, None)
    torch.ops.pygraph.dropout_mask([2, 3], [3, 1], torch.float32, cpu, 0.5, None)
    assert spans == [(5, 10), (15, 20)]


def test_programs() -> None:
    """A Program as it would be on a GPU: values have specs, and new nodes are where the dropout was."""

    def fn(x: torch.Tensor) -> Any:
        dropped = aten.native_dropout(x * 2, 0.25, True)
        return dropped[0] * 3, dropped[1]

    program = program_on_cuda(fn, (4, 6))
    split = prepare_program_draws(program)
    assert "native_dropout" in str(program)
    assert "native_dropout" not in str(split)
    x = torch.randn(4, 6)
    torch.manual_seed(5)
    wanted = fn(x)
    torch.manual_seed(5)
    torch.testing.assert_close(on_the_host(split.copy_graph())(x), wanted)
    assert prepare_program_draws(program_on_cuda(torch.sin, (3,))).nodes
    unaligned = program_on_cuda(lambda x: aten.native_dropout(x[1:], 0.25, True)[0], (9,))
    assert "native_dropout" in str(prepare_program_draws(unaligned))


def test_masks_in_graphs(device: torch.device) -> None:
    def fn(x: torch.Tensor) -> Any:
        layout = list(x.shape), list(x.stride()), x.dtype, x.device
        first = DROPOUT_MASK(*layout, 0.3, None)
        return x * first, DROPOUT_MASK(*layout, 0.6, first)

    fast = pygraph.jit(fn)
    for seed in range(4):
        x = torch.randn(4, 8, device=device)
        torch.manual_seed(seed)
        mine = fast(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(mine, fn(x), rtol=0, atol=0)
    assert fast.explain().to_dict()["kernels_in_graphs"] == 3


def test_no_mask_is_an_index_of_the_next(device: torch.device) -> None:
    """It is only drawn before it; were it an index, its memory could not be proven to be patched, and it be copied."""

    def fn(x: torch.Tensor) -> Any:
        layout = list(x.shape), list(x.stride()), x.dtype, x.device
        first = DROPOUT_MASK(*layout, 0.3, None)
        second = DROPOUT_MASK(*layout, 0.6, first)
        return first, x[second[0].long()]

    nodes = pygraph.trace(fn)(torch.randn(4, 4, device=device)).nodes
    first, second = [node for node in nodes if node.target is DROPOUT_MASK]
    reach = index_reach(nodes)
    assert first not in reach
    assert reach[second] is Reach.UNCHANGED
