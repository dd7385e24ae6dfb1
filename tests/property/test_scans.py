"""Generated bodies of scans, which are unrolled: results, gradients and random numbers are as in eager."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._higher_order_ops import scan  # checked with torch 2.11 and 2.13

import pygraph
from tests.extent import examples
from tests.sources import function_of
from tests.steps import assert_same

pytestmark = [
    pytest.mark.rotates,
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

LINES = (
    "a = a * 0.5 + x",
    "b = torch.tanh(b - a)",
    "a, b = b + x, a * 1.0",
    "y = (y @ weight).relu()",
    "y = y + torch.rand_like(y)",
    "y = torch.stack([y, b]).view(-1)[:3]",
    "made = x * y; made.mul_(2); b = b + made",
    "y = torch.where(x > 0, y, a)",
)
RESULTS = ("y + 0", "a.sum()", "y.exp() > b", "torch.stack([x, y])[:, :2]", "b.double() * 2")


@st.composite
def steps(draw: st.DrawFn) -> tuple[Callable[..., Any], str]:
    """A body, and its source."""
    lines = draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=5))
    results = draw(st.lists(st.sampled_from(RESULTS), min_size=1, max_size=3))
    lines = ["a, b = carried", "y = x + 1", *lines, f"return (a + x, b * 0.9), ({', '.join(results)},)"]
    source = "import torch\n\ndef fn(carried, x, weight):\n" + textwrap.indent("\n".join(lines), "    ")
    return function_of(source), source


@settings(max_examples=examples(3, 30), deadline=None)
@given(steps(), st.integers(1, 4), st.sampled_from([0, 1, -1]), st.booleans(), st.booleans())
def test_generated_scans(
    step: tuple[Callable[..., Any], str], length: int, dim: int, reverse: bool, differentiated: bool
) -> None:
    device = pygraph.default_device()
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).to(device)

    def fn(x: Tensor) -> Any:
        leaf = x.detach().requires_grad_(differentiated)
        start = leaf.sum(dim), torch.ones(3, device=x.device)
        last, found = scan(lambda c, x: step[0](c, x, weight), start, leaf, dim=dim, reverse=reverse)
        if not differentiated:
            return last, found
        total = sum((one.sum() for one in (*last, *found) if one.is_floating_point()), torch.zeros((), device=x.device))
        return torch.autograd.grad(total, leaf)

    fast = pygraph.jit(fn)
    x = torch.randn((length, 3) if dim == 0 else (3, length), generator=torch.Generator().manual_seed(1)).to(device)
    for argument in (x, -x):
        torch.manual_seed(3)
        try:
            wanted = fn(argument), torch.rand(2, device=device)
        except RuntimeError as error:  # of some results torch has no gradient
            with pytest.raises(type(error)):
                fast(argument)
            return
        torch.manual_seed(3)
        assert_same((fast(argument), torch.rand(2, device=device)), wanted, device)
    assert not fast.explain().to_dict()["fallbacks"], step[1]
