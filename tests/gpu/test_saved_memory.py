"""Saved tensors on CUDA: storages that are resized, and temporaries of Inductor's code in the memory of those read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pygraph
from pygraph.interop import live
from tests.unit.native.test_saved_memory import Training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's and Inductor's, which differ between versions
]


def test_a_storage_that_was_resized() -> None:
    """As fully sharded training does it with memory that it wants back."""
    training = Training(torch.device("cuda"))
    for _ in range(4):
        training.check(training.inputs())
    for _ in range(3):
        result = training.fast(training.inputs())
        storages = [t.untyped_storage() for t in result.grad_fn.saved_tensors if not t.requires_grad]  # pyright: ignore
        result.sum().backward()
        del result
        for storage in storages:
            storage.resize_(0)
        del storages, storage
        training.check(training.inputs())


class Layers(nn.Module):
    """Layers whose backward has temporaries as large as what the forward saves.

    Tests differ in the width: torch keeps a backward on disk, and whether it may run again is no part of its key.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(torch.sin(x)))
        return x


WAYS = {"plain": 256, "two forwards": 264, "kept": 272, "forgotten": 280}


def gradients(run: Callable[[torch.Tensor], torch.Tensor], net: nn.Module, way: str, seed: int) -> list[torch.Tensor]:
    """Of some forwards and backwards in an order of that name."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, y = torch.randn(2, 512, WAYS[way], device="cuda", generator=generator).unbind()
    net.zero_grad()
    first = run(x).square().mean()
    if way == "plain":
        first.backward()
    elif way == "two forwards":
        second = run(y).square().mean()
        first.backward()
        second.backward()
    elif way == "kept":
        first.backward(retain_graph=True)
        first.backward()
    else:
        run(y)
        first.backward()
    return [parameter.grad.clone() for parameter in net.parameters()]  # pyright: ignore


@pytest.mark.parametrize("way", WAYS)
def test_temporaries_lie_in_saved_tensors(way: str) -> None:
    """Those of the same backward, of whichever forward it is; and only if it cannot run again."""
    torch.manual_seed(0)
    net, before = Layers(WAYS[way]).cuda(), {*live.CALLABLES}
    fast = torch.compile(net, backend=pygraph.backend)
    for seed in range(6):
        got, expected = (gradients(run, net, way, seed) for run in (fast, net))
        torch.testing.assert_close(got, expected)
    backwards = [
        (executable.program, graph)
        for one in {*live.CALLABLES} - before
        for function in one.functions()
        for executable in (entry.executable for entry in function.cache.entries)
        for graph in executable.graphs
        if one.__name__.startswith("backward")
    ]
    assert backwards
    for program, graph in backwards:
        placed = [node for node in program.nodes if node.target is torch.ops.pygraph.scratch.default]
        assert bool(placed) == (way != "kept")
        assert graph.bytes_copied == 0
        assert graph.body.updated == []


def test_a_graph_that_was_not_to_be_kept() -> None:
    """As with all other backends of `torch.compile`."""
    net = Layers(288).cuda()
    fast = torch.compile(net, backend=pygraph.backend)
    for _ in range(3):
        fast(torch.randn(512, 288, device="cuda")).sum().backward()
    loss = fast(torch.randn(512, 288, device="cuda")).sum()
    with pytest.raises(RuntimeError, match="donated buffer"):
        loss.backward(retain_graph=True)
