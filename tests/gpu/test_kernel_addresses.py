"""Which arguments indices are computed from, read off the source of Inductor's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph.runtime.body import RegionBody
from pygraph.runtime.indices import Reach

pytestmark = pytest.mark.gpu

SCORES, CLASSES = torch.randn(64, 100), torch.randint(0, 100, (64,))
TABLE, ROWS, SCALES = torch.randn(50, 16), torch.randint(0, 50, (33,)), torch.rand(33)
VALUES = torch.randn(33, 16)


def loss(scores: Any, classes: Any) -> Any:
    return F.cross_entropy(scores * 2, classes)


def loss_gradient(scores: Any, classes: Any) -> Any:
    scores = scores.detach().requires_grad_()
    return torch.autograd.grad(loss(scores, classes), scores)


def lookup(table: Any, rows: Any, scales: Any) -> Any:
    return F.embedding(rows, table) * scales[:, None]


def computed(table: Any, a: Any, b: Any) -> Any:
    return table[(a * b * 10).long().clamp(0, 49)] + table[((a + b) * 3).to(torch.int64)]


def masked(table: Any, rows: Any, scales: Any) -> Any:
    return torch.where(scales[:, None] > 0.5, table[rows], 0.0)


def added(table: Any, rows: Any, values: Any) -> Any:
    return table.index_put((rows,), values * 2, accumulate=True)


def gathered(scores: Any, classes: Any) -> Any:
    return scores.gather(1, classes[:, None]) * scores.sum(1, keepdim=True)


def through_another(table: Any, rows: Any, positions: Any) -> Any:
    return table[rows][positions.long()]


CASES: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[bool, ...]]] = [
    (loss, (SCORES, CLASSES), (False, True)),
    (loss_gradient, (SCORES, CLASSES), (False, True)),
    (lookup, (TABLE, ROWS, SCALES), (False, True, False)),
    (computed, (TABLE, SCALES, SCALES.flip(0)), (False, True, True)),
    (masked, (TABLE, ROWS, SCALES), (False, True, False)),
    (added, (TABLE, ROWS, VALUES), (False, True, False)),
    (gathered, (SCORES, CLASSES), (False, True)),
    (through_another, (TABLE, ROWS, torch.tensor([3.0, 1.0, 32.0])), (False, True, True)),
]


@pytest.mark.parametrize(("fn", "args", "expected"), CASES, ids=[fn.__name__ for fn, _, _ in CASES])
def test_only_what_addresses_are_made_of_reaches_an_index(
    fn: Callable[..., Any], args: tuple[torch.Tensor, ...], expected: tuple[bool, ...]
) -> None:
    given = [tensor.cuda() for tensor in args]
    program = pygraph.graphify(pygraph.indirect(pygraph.fuse(pygraph.trace(fn)(*given))))
    assert any(node.target is torch.ops.pygraph.launch.default for node in program.nodes)
    body = RegionBody(program, 0)
    loads = sorted(body.inputs, key=lambda node: int(str(node.args[1])))  # by the slots of arguments
    assert tuple(body.reach.get(node, Reach.NOT) is not Reach.NOT for node in loads) == expected
    fast = pygraph.jit(fn, fuse=True)
    for _ in range(2):
        torch.testing.assert_close(fast(*given), fn(*given))
