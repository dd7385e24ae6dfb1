"""Arguments that are a ``torch.Size``: sizes inside the function, whose numbers are treated as those of a tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pygraph

pytestmark = pytest.mark.usefixtures("native")

SIZE = torch.Size([2, 3])


def asks_for_classes(x: Tensor, size: Any) -> Tensor:
    assert type(size) is torch.Size
    return x * (2 if isinstance(size[1:], torch.Size) and isinstance(size, torch.Size) else 3)


FUNCTIONS: dict[str, Callable[[Tensor, Any], Any]] = {
    "view": lambda x, size: torch.sin(x).view(size),
    "view of items": lambda x, size: torch.sin(x).view(*size),
    "number of elements": lambda x, size: x.sum() / size.numel(),
    "a number": lambda x, size: x * size[0],
    "new": lambda x, size: torch.zeros(size, device=x.device) + x[0],
    "longer": lambda x, size: (x * 2).view((1, *size)) + torch.ones(size + (1,), device=x.device)[0, 0],  # noqa: RUF005
    "classes": asks_for_classes,
    "compared": lambda x, size: x * 2 if size == (2, 3) else x * 3,
    "key": lambda x, size: x * {(2, 3): 4.0}[size],
    "text": lambda x, size: x * len(str(size)),
    "returned": lambda x, size: (x * 2, size),
}


@pytest.mark.parametrize("static", [(), 1], ids=["live", "static"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_size_has_a_graph(device: torch.device, name: str, static: Any) -> None:
    function, x = FUNCTIONS[name], torch.arange(6.0).to(device)
    fast = pygraph.jit(function, strict=True, static_argnums=static)
    for _ in range(4):
        torch.testing.assert_close(fast(x, SIZE), function(x, SIZE), rtol=0, atol=0)
    assert fast.cache_info()[:3] == (3, 1, 1)


@pytest.mark.parametrize("name", ["view", "number of elements", "classes"])
def test_a_size_under_autograd(device: torch.device, name: str) -> None:
    function, x = FUNCTIONS[name], torch.arange(6.0).to(device).requires_grad_()
    fast = pygraph.jit(function, strict=True)
    for _ in range(3):
        found = [torch.autograd.grad(call(x, SIZE).square().sum(), x)[0] for call in (fast, function)]
        torch.testing.assert_close(*found, rtol=0, atol=0)


def test_sizes_tuples_and_lists_are_of_different_kinds(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, size: x * (2 if isinstance(size, torch.Size) else 3)), torch.ones(6, device=device)
    for _ in range(3):
        for size in (SIZE, (2, 3), [2, 3], torch.Size([3, 2])):
            assert fast(x, size)[0].item() == (2.0 if isinstance(size, torch.Size) else 3.0)
    assert fast.cache_info().captures == 3  # the numbers are live


def test_a_size_in_a_container(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, sizes: (x * 2).view(sizes["a"][0]), strict=True), torch.ones(6, device=device)
    for size in [(2, 3), (3, 2), (2, 3)]:
        assert fast(x, {"a": [torch.Size(size)]}).shape == size


def test_a_size_of_a_lowered_call(device: torch.device) -> None:
    lowered = pygraph.jit(FUNCTIONS["classes"]).lower(torch.ones(6, device="meta"), SIZE)
    assert torch.equal(lowered.compile()(torch.ones(6, device=device), SIZE), torch.full((6,), 2.0, device=device))


def test_a_size_that_is_mapped_over(device: torch.device) -> None:
    fast = pygraph.jit(lambda x, size: (x * 2).view(size))
    assert torch.func.vmap(fast, in_dims=(0, None))(torch.ones(4, 6, device=device), SIZE).shape == (4, 2, 3)
