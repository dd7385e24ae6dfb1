"""Generated functions with statements that are in no graph: results, logs and random numbers are as in eager."""

from __future__ import annotations

import functools
import random
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pygraph
from tests.extent import examples
from tests.sources import function_of
from tests.steps import assert_same

pytestmark = pytest.mark.rotates

COMPUTING = (
    "x = x * 1.5 - y",
    "y = (x.T @ x).mean(0) + y",
    "x = self.block(x)",
    "x, y = x.tanh() + k, y.abs()",
    "some = {n: v * 2 for n, v in zip('ab', (x, y))}; x = some['a'] - some['b']",
    "x = torch.where(x > 0, x, y)",
    "x = helped(self, x, k)",
    "y = y + torch.rand_like(y)",
    "k = k + 1",
)
BLOCKING = (
    "log.append(str(y.detach()))",
    "log.append(x.detach().cpu().numpy().shape)",
    "y = y * random.random()",
    "n = {v: 1 for v in (y > 0).tolist()}; k = k + len(n)",
    "self.calls += 1",
    "log.append(f'{y.sum().item():.4f}')",
    "x = solved(x)",
)
CONDITIONS = ("y.sum() > 0", "k % 2", "len(log) < 3", "x.abs().max().item() > 1")
PRELUDE = """
def helped(self, x, k):
    for _ in range(2):
        x = self.block(x) * 0.5
    assert str(x.detach())
    return x + k

def solved(x):
    turns = 0
    while x.abs().max() > 1.5 and turns < 6:
        x = x * 0.6
        x = x - x.mean() * 0.1
        turns += 1
    return x
"""


@st.composite
def blocks(draw: st.DrawFn, depth: int = 0) -> list[str]:
    """Lines of statements."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("compute", "compute", "compute", "block", "if", "for", "with", "try")))
        if kind in ("compute", "block") or depth == 2:
            lines.append(draw(st.sampled_from(BLOCKING if kind == "block" else COMPUTING)))
            continue
        inner = draw(blocks(depth + 1))
        condition = draw(st.sampled_from(CONDITIONS))
        ends = [f"    if {condition}: break"] if kind == "for" and draw(st.booleans()) else []
        head = {"if": f"if {condition}:", "for": "for i in range(3):", "with": "with torch.no_grad():", "try": "try:"}
        lines += [head[kind], *(f"    {line}" for line in inner), *ends]
        if kind == "try":
            lines += ["except ZeroDivisionError:", "    log.append('never')"]
    return lines


def made(lines: list[str]) -> Callable[..., Any]:
    """The function of lines, which has a source."""
    body = textwrap.indent("\n".join([*lines, "return x, y, k"]), "    ")
    return function_of(f"import random, torch\n{PRELUDE}\ndef fn(self, log, x, y, k=0):\n{body}\n")


class State(nn.Module):
    """Where the functions find a module, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.calls = 0


def outcome(device: torch.device, lines: list[str], *, jitted: bool, graded: bool, passed: bool) -> tuple[Any, Any]:
    """The tensors of six calls, and all else that they leave behind.

    Args:
        device: The device.
        lines: The lines of the function.
        jitted: Whether it is.
        graded: Whether parameters of its module require gradients.
        passed: Whether the module and the log are arguments, and not what it closes over.
    """
    torch.manual_seed(0)
    state, log, plain = State().to(device).requires_grad_(graded), list[Any](), made(lines)
    transformed = pygraph.jit if jitted else lambda fn: fn
    if passed:
        run = functools.partial(transformed(plain), state, log)
    else:
        run = transformed(lambda x, y, k: plain(state, log, x, y, k))
    torch.manual_seed(1)
    random.seed(1)
    tensors: list[Any] = []
    numbers: list[Any] = []
    for seed in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(device)
        *results, number = run(x, x[seed % 3] * 2, seed % 3)
        tensors.append([one.detach() for one in results])
        numbers.append(number)
    return [*tensors, torch.rand(2), torch.rand(2, device=device)], (numbers, log, state.calls, random.random())


@settings(max_examples=examples(6, 60))
@given(lines=blocks(), graded=st.booleans(), passed=st.booleans())
def test_as_in_eager(device: torch.device, lines: list[str], graded: bool, passed: bool) -> None:
    expected, others = outcome(device, lines, jitted=False, graded=graded, passed=passed)
    found, found_others = outcome(device, lines, jitted=True, graded=graded, passed=passed)
    assert found_others == others, "\n".join(lines)
    assert_same(found, expected, device)
