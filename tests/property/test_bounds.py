"""Generated functions of tensors whose size depends on data: padded to bounds, they compute what eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import pygraph
from pygraph.errors import UndecidedError
from pygraph.transforms.devicify import devicify_program
from tests.extent import examples
from tests.sources import function_of

BOUNDS = {"nonzero": None, "index": None, "masked_select": None, "unique": None, "repeat_interleave": 40}

# Statements that bind `y`, two dimensions of which the first depends on data and the other one is 4.
SOURCES = (
    "m = x[:, 0] > 0; y = x[m]; i = torch.where(m)[0]",
    "i = torch.nonzero(x[:, 1] > 0.2)[:, 0]; y = x[i]",
    "i, j = torch.where(x > 0.3); y = x[i] * x[i, j, None]",
    "i = torch.repeat_interleave(k.abs() % 3); y = x[i]",
    "i = k.unique() % 6; y = x[i]",
    "i, c = torch.unique(k, return_counts=True); y = x[i % 6] * c[:, None]; i = i % 6",
    "m = x > 0; y = x[m].unsqueeze(1) * x[0]; i = torch.where(m)[0]",
    "y = torch.masked_select(x, x[:, :1] > 0).unsqueeze(1) * x[1]; i = torch.arange(y.shape[0], device=x.device) % 6",
)
ROWS = (
    "y = y * 2 + x[0]",
    "y = y.exp() - y.mean(1, keepdim=True)",
    "y = y @ w",
    "y = torch.nn.functional.linear(y, w, x[2])",
    "y = y.softmax(-1)",
    "y = torch.nn.functional.layer_norm(y, (4,))",
    "y = y.view(-1, 2, 2).transpose(1, 2).flatten(1)",
    "y = torch.cat([y[:, 2:], y[:, :2]], 1)",
    "y = y + x[i]",
    "y = y * y.sum(0)",
    "y = y / (y.abs().amax(1, keepdim=True) + 1)",
    "y = y.sort(1).values.flip(1)",
    "y = torch.where(y > 0, y, y * 0.1)",
    "y = y - y.mean(0) / (y.shape[0] + 1)",
    "y = y + torch.nn.functional.embedding(i, x)",
    "y = y + torch.ones(y.shape[0], 4, device=x.device)",
    "y = y.t().contiguous().t()",
    "y = y.clone(); y[:, 1] = y[:, 0]",
    "y = y.gather(1, (y > 0).long())",
    "y = y + y.cumsum(1).half().float()",
    "z = y > 0.5; y = y[z[:, 0]]; i = i[z[:, 0]]",
    "y = y // (y.round().int() ** 2 + 1)",
    "y = y * (7 // (i + 1))[:, None]",
    "y = (y[:, :, None] * x[i][:, None]).sum(1)",
)
SINKS = (
    "y.sum()",
    "y.mean(0)",
    "y.square().mean()",
    "(y > 0).any(0)",
    "(y > -1).all()",
    "y.t() @ y",
    "torch.zeros_like(x).index_add(0, i, y)",
    "x.index_put((i,), y, accumulate=True)",
    "torch.zeros_like(x).scatter_add(0, i[:, None].expand(-1, 4), y)",
    "x.new_zeros(6, 4).index_put((i,), x.new_ones(()))",
    "torch.nn.functional.cross_entropy(y, i % 4)",
    "torch.nn.functional.mse_loss(y, x[i])",
    "torch.nn.functional.cross_entropy(y, i % 4, reduction='sum')",
    "y",
    "(y, i)",
    "torch.linalg.vector_norm(y, dim=0)",
    "torch.einsum('nc,nd->cd', y, x[i])",
    "y.shape[0] * x.sum()",
    "y.prod()",
)
NEED_WHOLE = ("y", "(y, i)", "torch.linalg.vector_norm(y, dim=0)")


@st.composite
def functions(draw: st.DrawFn) -> str:
    lines = [draw(st.sampled_from(SOURCES)), *draw(st.lists(st.sampled_from(ROWS), max_size=4))]
    sinks = draw(st.lists(st.sampled_from(SINKS), min_size=1, max_size=3))
    lines.append(f"return ({', '.join(sinks)},)")
    return "\n".join(["import torch", "def fn(x, k, w):", *(f"    {line}" for line in lines)])


def arguments(seed: int, shift: float, device: torch.device) -> tuple[torch.Tensor, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x, k, w = torch.randn(6, 4) + shift, torch.randint(0, 9, (6,)), torch.randn(4, 4) / 2
    return tuple(one.to(device) for one in (x, k, w))


@settings(max_examples=examples(15, 500))
@given(source=functions(), seeds=st.lists(st.integers(0, 1000), min_size=2, max_size=2), shift=st.floats(-1.5, 1.5))
def test_padded_to_bounds(device: torch.device, source: str, seeds: list[int], shift: float) -> None:
    fn = function_of(source)
    with torch.no_grad():
        first, second = (arguments(seed, shift * index, device) for index, seed in enumerate(seeds))
        try:
            traced = pygraph.trace(fn)(*first)
        except UndecidedError:
            reject()  # sizes of two masks, which Python compares
        program = devicify_program(traced, BOUNDS)
        for args in (first, second):
            torch.testing.assert_close(pygraph.evaluate(program, *args), fn(*args), equal_nan=True)


ASKED = ("y = y.clone(); y[:, 1] = y[:, 0]", "torch.nn.functional.mse_loss(y, x[i])")


def skip_where_torch_asks(line: str | None) -> None:
    if line in ASKED and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 asks whether the size that depends on data is 1")


@pytest.mark.rotates
@pytest.mark.parametrize("row", [None, *(row for row in ROWS if "shape[0] + 1" not in row)])
def test_each_operation_is_in_the_graph(device: torch.device, row: str | None) -> None:
    skip_where_torch_asks(row)
    fn = function_of(f"import torch\ndef fn(x, k, w):\n    {SOURCES[0]}\n    {row or 'pass'}\n    return y.sum()")
    check_in_one_graph(fn, device)


@pytest.mark.rotates
@pytest.mark.parametrize("sink", [sink for sink in SINKS if sink not in NEED_WHOLE])
def test_each_result_is_in_the_graph(device: torch.device, sink: str) -> None:
    skip_where_torch_asks(sink)
    fn = function_of(f"import torch\ndef fn(x, k, w):\n    {SOURCES[0]}\n    return {sink}")
    check_in_one_graph(fn, device)


@pytest.mark.rotates
@pytest.mark.parametrize("source", [source for source in SOURCES if "repeat" not in source])
def test_each_source_is_in_the_graph(device: torch.device, source: str) -> None:
    fn = function_of(f"import torch\ndef fn(x, k, w):\n    {source}\n    return y.sum()")
    check_in_one_graph(fn, device)


def check_in_one_graph(fn: Callable[..., Any], device: torch.device) -> None:
    with torch.no_grad():
        program = pygraph.graphify(pygraph.devicify(pygraph.trace(fn)(*arguments(0, 0.0, device)), bounds=BOUNDS))
        assert [region.kind for region in program.regions] == ["graph"], program.fallbacks
        for shift in (0.0, 5.0, -5.0):
            args = arguments(1, shift, device)
            torch.testing.assert_close(pygraph.evaluate(program, *args), fn(*args), equal_nan=True)
