"""Operations that torch.func decomposes round as in eager, to the last bit, wherever a jitted function is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import pygraph

Function = Callable[..., Any]

STACKS: dict[str, Callable[[Function, Tensor], Any]] = {
    "vjp": lambda f, x: (lambda out, pull: (out, pull(torch.ones_like(out))))(*vjp(f, x)),
    "grad": lambda f, x: grad(lambda x: f(x).sum())(x),
    "vmap(grad)": lambda f, x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, -x])),
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),)),
    "jacrev": lambda f, x: jacrev(f)(x),
    "grad(grad)": lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).float().square().sum())(x),
    "nothing": lambda f, x: f(x),
}

FUNCTIONS: dict[str, Callable[[Tensor], Function]] = {
    "a loss": lambda other: lambda x: F.binary_cross_entropy_with_logits(x, other, other.square(), pos_weight=other[0]),
    "torch's function": lambda other: lambda x: torch.binary_cross_entropy_with_logits(x, other, other, None, 0),
    "a layer": lambda other: lambda x: F.linear(x, other),
    "a layer with bias": lambda other: lambda x: F.linear(x, other, other[0]),
    "a layer of batches": lambda other: lambda x: F.linear(x.expand(2, 5, 5), other, other[0]),
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_round_as_in_eager(device: torch.device, name: str, stack: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, other = (torch.rand(5, 5, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    function = FUNCTIONS[name](other)
    expected, fast = pytree.tree_leaves(STACKS[stack](function, x)), pygraph.jit(function)
    for _ in range(2):
        for got, wanted in zip(pytree.tree_leaves(STACKS[stack](fast, x)), expected, strict=True):
            assert torch.equal(got, wanted)
    assert not fast.explain().inlined


def test_what_torch_takes_apart() -> None:
    """A new composite operation needs a look: its decomposition may round otherwise than it does."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key  # checked with torch 2.11 and 2.13
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    apart = {name for name in names if has(name, "FuncTorchDynamicLayerFrontMode")}
    assert {name for name in apart if not has(name, "CompositeImplicitAutograd")} == {
        "aten::binary_cross_entropy_with_logits"
    }
