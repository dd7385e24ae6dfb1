"""Sizes that data decide: they are ints to a function, and where a view needs one of its own, errors are eager's."""

from __future__ import annotations

import numbers
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


def by_case(x: Tensor) -> Tensor:
    match x[x > 0].shape[0]:
        case int():
            return x * 2
        case _:
            return x * 0


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "a size of a mask": lambda x: x * 2 if isinstance(x[x > 0].shape[0], int) else x * 0,
    "one of several classes": lambda x: x * 2 if isinstance((x > 0).nonzero().size(0), (int, float)) else x * 0,
    "its class": lambda x: x * n if type(n := x[x > 0].numel()) is int else x * 0,
    "the name of its class": lambda x: {"int": x * 2}.get(type(x.unique().shape[0]).__name__, x * 0),
    "a number": lambda x: x * 2 if isinstance(x[x > 0].shape[0], numbers.Number) else x * 0,
    "all sizes": lambda x: x * 2 if all(isinstance(d, int) for d in (x > 0).nonzero().shape) else x * 0,
    "a stride": lambda x: x * 2 if isinstance((x > 0).nonzero().t().contiguous().stride(0), int) else x * 0,
    "computed": lambda x: x * 2 if isinstance(x[x > 0].shape[0] * 2 + 1, int) else x * 0,
    "a comparison": lambda x: x * 2 if isinstance(x[x > 0].shape[0] > 2, bool) else x * 0,
    "returned": lambda x: [x * 2, isinstance(x[x > 0].shape[0], int)],
    "a case": by_case,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_size_that_data_decides_is_an_int(device: torch.device, name: str) -> None:
    function = KINDS[name]
    fast = pygraph.jit(function)
    for number in range(4):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(number)).to(device)
        assert outcome(fast, x) == outcome(function, x)


BY_OUTCOME: dict[str, Callable[[Tensor, dict[bool, int]], Tensor]] = {
    "identity": lambda x, counts: x * (1 if (x.sum() > 0).item() is True else 0),
    "class": lambda x, counts: x * (2 if isinstance((x.sum() > 0).item(), bool) else 1),
    "type": lambda x, counts: x * (2 if type((x > 0).any().item()) is bool else 1),
    "list": lambda x, counts: x * (x > 0).tolist().count(True),
    "key": lambda x, counts: x * counts.setdefault((x.sum() > 0).item() is not False, len(counts) + 2),
}


@pytest.mark.parametrize("name", BY_OUTCOME)
def test_an_outcome_on_the_device_is_a_bool_to_the_function(device: torch.device, name: str) -> None:
    def run(wrap: Callable[..., Any]) -> list[tuple[list[float], dict[bool, int]]]:
        counts: dict[bool, int] = {}
        call, found = wrap(lambda x: BY_OUTCOME[name](x, counts)), []
        for number in range(8):
            x = torch.randn(3, generator=torch.Generator().manual_seed(number)).to(device)
            found.append((call(x).tolist(), dict(counts)))
        return found

    assert run(pygraph.jit) == run(lambda fn: fn)
