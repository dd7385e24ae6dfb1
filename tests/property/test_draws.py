"""Generated functions that update state, draw from Python's, NumPy's and torch's generators, and decide by these."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pygraph
from tests.extent import examples
from tests.sources import execute

CALLS = 6

STATEMENTS = (
    "h.add_(x.sum())",
    "h.mul_(0.5)",
    "x = x + h",
    "x = x * random.random()",
    "x = x + np.random.uniform(0, 2)",
    "x = x * torch.tensor([random.random(), 1.0, 2.0, 3.0], device=x.device)",
    "x = x[[random.randint(0, 3), 1, 2, random.randint(0, 3)]]",
    "x = x[random.sample(range(4), 4)]",
    "x = x[torch.from_numpy(np.random.permutation(4)).to(x.device)]",
    "x = x * random.choice([1.0, 2.0, 3.0])",
    "x = x + torch.rand(4, device=x.device)",
    "x = x + torch.rand(4, device='cpu').to(x.device)",
    "x = x.clone(); i = random.randint(0, 3); x[i : i + int(random.uniform(1, 3))] = 0",
    "x = x.clone(); x[: 1 + int(x.abs().sum()) % 3] += 1",
    "if random.random() < 0.5: x = x.flip(0)",
    "if np.random.rand() < 0.5: h.sub_(1)",
    "if x.sum() > 1: x = x * 0.5",
    "if h.sum() > 1: h.fill_(random.random())",
    "x = x * (x.sum().item() > 0)",
)


def run(lines: list[str], device: torch.device, *, jitted: bool) -> list[Any]:
    """Results, state and the state of the generators after each call."""
    h = torch.zeros(4, device=device)
    source = "\n".join(["def fn(x):", *(f"    {line}" for line in lines), "    return x"])
    scope: dict[str, Any] = {"h": h, "random": random, "np": np, "torch": torch}
    execute(source, scope)
    fast = pygraph.jit(scope["fn"]) if jitted else scope["fn"]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    found: list[Any] = []
    for k in range(CALLS):
        found.append((fast(torch.linspace(-1, 1, 4, device=device) + k % 3 - 1).clone(), h.clone()))
        found.append([random.getstate()[1][-1], int(np.random.get_state()[2]), torch.get_rng_state().tolist()])  # type: ignore[index]
    return found


@settings(max_examples=examples(12, 400))
@given(lines=st.lists(st.sampled_from(STATEMENTS), min_size=2, max_size=7))
def test_as_in_eager(device: torch.device, lines: list[str]) -> None:
    pygraph.jit(lambda x: x * random.random())(torch.ones(1, device=device))  # states of `random` are read from now on
    torch.testing.assert_close(run(lines, device, jitted=True), run(lines, device, jitted=False))
