"""Generated functions that decide by values on the device, in another way at each call: all is as in eager."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pygraph
from pygraph.runtime import executable, resuming
from tests.extent import examples
from tests.sources import function_of
from tests.steps import assert_same

COMPUTING = (
    "x = x * 1.5 - y",
    "y = (x.T @ x).mean(0) + y",
    "z = x.tanh(); x = z + y",
    "x, y = x.tanh(), y.abs()",
    "z = x",
    "z = x[1:]",
    "x = x.clone()",
    "x = x.clone(); x[0] = y",
    "x = x + 1; x.mul_(0.5)",
    "y = y.clone().add_(z.sum())",
    "x = self.block(x)",
    "z = torch.where(x > 0, x, y)",
    "z = (x * 2, z)[0]",
    "i = x.argmax(); y = y + x.flatten()[i]",
)
EFFECTS = (
    "self.mean.mul_(0.9).add_(y * 0.1)",
    "self.calls += 1",
    "self.last = y",
    "y = y + self.mean",
    "y = y + torch.rand_like(y)",
    "torch.rand_like(y)",
    "x = torch.dropout(x, 0.3, True)",
    "other.add_(y)",
    "y = y + other",
    "n = int((x > 0).sum()) % 3; x = x + n",
    "z = x[x[:, 0] > 0].sum(0)",
)
CONDITIONS = (
    "y.sum() > 0",
    "x.mean() > 0.1",
    "z.max() > 1",
    "x.abs().max().item() > 1 and y[0] > 0",
    "not (y > -1).all()",
    "self.mean.sum() > 0.2",
    "torch.rand_like(y).sum() > 2",
)


@st.composite
def blocks(draw: st.DrawFn, depth: int = 0) -> list[str]:
    """Lines of statements."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("compute", "compute", "effect", "if", "if", "return")))
        if kind == "effect":
            lines.append(draw(st.sampled_from(EFFECTS)))
        elif kind == "compute" or depth == 2:
            lines.append(draw(st.sampled_from(COMPUTING)))
        else:
            lines.append(f"if {draw(st.sampled_from(CONDITIONS))}:")
            lines += [f"    {line}" for line in draw(blocks(depth + 1))]
            lines += ["    return x, z"] if kind == "return" else []
            if kind == "if" and draw(st.booleans()):
                lines += ["else:", *(f"    {line}" for line in draw(blocks(depth + 1)))]
    return lines


class State(nn.Module):
    """Where the functions find a module, a buffer and a counter."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0
        self.last: Any = None


def made(lines: list[str]) -> Callable[..., Any]:
    """The function of lines, which has a source."""
    body = textwrap.indent("\n".join(["z = x * y", *lines, "return x, y, z"]), "    ")
    return function_of(f"import torch\ndef fn(self, other, x, y):\n{body}\n")


def outcome(device: torch.device, lines: list[str], calls: list[int], *, jitted: bool, graded: bool) -> Any:
    """The results of calls, and all that they leave behind."""
    torch.manual_seed(0)
    state, plain = State().to(device).requires_grad_(graded), made(lines)
    fast = pygraph.jit(lambda other, x, y: plain(state, other, x, y)) if jitted else None
    torch.manual_seed(1)
    other = torch.zeros(4, device=device)
    found: list[Any] = []
    for seed in calls:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(device)
        x, y = x * (0.3, 1, 2)[seed % 3], x[seed % 3] * (1, -1)[seed % 2]
        results = plain(state, other, x, y) if fast is None else fast(other, x, y)
        found.append([[one.detach().clone() for one in results], other.clone(), x, state.mean.clone(), state.calls])
        found[-1].append(None if state.last is None else state.last.detach().clone())
    return [*found, torch.rand(2), torch.rand(2, device=device)]


@settings(max_examples=examples(12, 150))
@given(lines=blocks(), calls=st.lists(st.integers(0, 11), min_size=10, max_size=16), graded=st.booleans())
def test_as_in_eager(device: torch.device, lines: list[str], calls: list[int], graded: bool) -> None:
    expected = outcome(device, lines, calls, jitted=False, graded=graded)
    found = outcome(device, lines, calls, jitted=True, graded=graded)
    try:
        assert_same(found, expected, device)
    except AssertionError:
        print("\n".join(lines))
        raise


def test_that_calls_go_on(device: torch.device) -> None:
    """The property would hold as well if none did."""
    lines = ["z = (x @ x.T).tanh()", "if z.sum() > 2:", "    x = x - z.mean()", "else:", "    y = y * z.amax()"]
    calls = [1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 0]
    begins: list[int] = []

    def noted(*args: Any) -> int:
        begins.append(begin_of(*args))
        return begins[-1]

    begin_of = resuming.begin_of
    with mock.patch.object(executable.resuming, "begin_of", noted):
        found = outcome(device, lines, calls, jitted=True, graded=False)
    assert_same(found, outcome(device, lines, calls, jitted=False, graded=False), device)
    assert len([begin for begin in begins if begin]) > 2
