"""Dropouts below ``torch.compile``: eager's random numbers, by kernels that draw masks alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout

import pygraph
from pygraph.interop import live

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's and Inductor's, which differ between versions
]
CUDA = torch.device("cuda", 0)


def node_names() -> list[str]:
    """The names of the nodes of all graphs that are alive."""
    entries = [e for replay in live.CALLABLES for function in replay.functions() for e in function.cache.entries]
    graphs = [graph for entry in entries if entry.executable is not None for graph in entry.executable.graphs]
    return [node.name for graph in graphs for node in graph.graph.nodes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4,), (256,), (1028,), (300, 4096), (7, 132, 1056, 8)])
def test_masks_are_those_of_eager(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def fn(x: torch.Tensor) -> Any:
        first = dropout(x, 0.1)
        return first, dropout(first * 2, 0.7), torch.rand(5, device=CUDA)

    fast = torch.compile(fn, backend=pygraph.backend)
    for seed in range(4):
        x = torch.randn(shape, device=CUDA, dtype=dtype)
        found = []
        for one in (fast, fn):
            torch.manual_seed(seed)
            found.append([*one(x), torch.cuda.get_rng_state()])
        (first, second, *mine), (other_first, other_second, *others) = found
        for one, other in zip([first, second == 0, *mine], [other_first, other_second == 0, *others], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        torch.testing.assert_close(second, other_second)  # Inductor does not round what is only read by the same kernel
    assert sum("pygraph_dropout_mask" in name for name in node_names()) == 2
    assert not any("fused_dropout" in name for name in node_names())


@pytest.mark.parametrize("count", [1, 3, 6, 1026])
def test_sizes_that_eager_draws_in_another_way(count: int) -> None:
    fast = torch.compile(lambda x: dropout(x, 0.5) + 1, backend=pygraph.backend)
    for seed in range(3):
        x = torch.randn(count, device=CUDA)
        torch.manual_seed(seed)
        mine = fast(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(mine, dropout(x, 0.5) + 1, rtol=0, atol=0)


def test_training() -> None:
    """Attention and a layer with dropouts: losses and gradients of eager with the same seed."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1)).to(CUDA)

    def step(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        scores = dropout(run(x).softmax(-1), 0.3)
        loss = (scores @ x.transpose(-1, -2)).square().mean()
        loss.backward()
        return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]

    fast = torch.compile(model, backend=pygraph.backend)
    for seed in range(5):
        x = torch.randn(8, 32, 64, device=CUDA)
        torch.manual_seed(seed)
        mine = step(fast, x)
        torch.manual_seed(seed)
        torch.testing.assert_close(mine, step(model, x), rtol=1e-4, atol=1e-5)
    assert sum("pygraph_dropout_mask" in name for name in node_names()) == 2
    fallbacks = pygraph.explain().to_dict()["fallbacks"]
    assert not [one for one in fallbacks if "a result is copied" in one["what"]], fallbacks
