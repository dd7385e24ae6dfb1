"""Sizes that data decide, where a view needs one of its own: errors come where eager has them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph

USES: dict[str, Callable[[Tensor], Any]] = {
    "a view of one item": lambda x: x.view(1),
    "a view of two": lambda x: x.view(2) + 1,
    "the first": lambda x: x[0],
    "narrowed": lambda x: x.narrow(0, 0, 1),
    "an inferred size": lambda x: x.view(-1, 1).sum(1),
    "expanded": lambda x: x.expand(2),
    "expanded to another": lambda x: x + torch.ones(2, device=x.device),
    "written": lambda x: torch.zeros(2, device=x.device).index_copy(0, torch.arange(2, device=x.device)[: len(x)], x),
    "summed": lambda x: x.sum(),
    "concatenated": lambda x: torch.cat([x, x]),
}


def outcome(function: Callable[..., Any], *args: Any) -> str:
    """The text of what a function returns, or that it raises."""
    try:
        return repr(function(*args))
    except (RuntimeError, IndexError):
        return "an error"


@pytest.mark.parametrize("sized", ["slice", "mask"])
@pytest.mark.parametrize("name", USES)
def test_errors_of_sizes(device: torch.device, name: str, sized: str) -> None:
    use = USES[name]

    def function(x: Tensor, n: Tensor) -> Any:
        y = x.sin()
        return use(y[: n.item()] if sized == "slice" else y[torch.arange(2, device=x.device) < n])

    fast = pygraph.jit(function)
    x = torch.arange(2.0, device=device)
    for n in (1, 1, 2, 0, 1, 2, 0):
        size = torch.tensor(n, device=device)
        assert outcome(fast, x, size) == outcome(function, x, size), n
