"""Traces know the strides that the device gives to results which PyTorch describes otherwise."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pygraph
from pygraph.tracing import layouts

aten = torch.ops.aten

OPERATIONS: dict[str, Callable[..., Any]] = {
    "softplus": lambda g, x: aten.softplus_backward(g, x, 1, 20),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, -1, 1),
    "hardswish": aten.hardswish_backward,
    "logit": lambda g, x: aten.logit_backward(g, x.sigmoid(), None),
    "dropout": lambda g, x: aten.native_dropout_backward(g, x > 0, 2.0),
    "log_softmax": lambda g, x: aten._log_softmax_backward_data(g, x, 1, torch.float32),
    "mse": lambda g, x: aten.mse_loss_backward(g.sum(), x, g, 1),
    "smooth l1": lambda g, x: aten.smooth_l1_loss_backward(g.sum(), x, g, 1, 1.0),
    "huber": lambda g, x: aten.huber_loss_backward(g.sum(), x, g, 1, 1.0),
    "binary cross entropy": lambda g, x: aten.binary_cross_entropy(g.sigmoid(), x.sigmoid(), None, 0),
    "copysign": lambda g, x: torch.copysign(x, g.sum()),
    "rounded": lambda g, x: torch.div(x, g.sum(), rounding_mode="floor"),
    "power": lambda g, x: torch.pow(2.0, x),
    "xlogy": lambda g, x: torch.xlogy(x, g[:1].abs()),
    "and": lambda g, x: torch.logical_and(g[:, :1] > 0, x > 0),
    "heaviside": lambda g, x: torch.heaviside(x, g[:1]),
    "log sigmoid": lambda g, x: F.logsigmoid(x),
    "sum": lambda g, x: g + x,
    "layer norm": lambda g, x: aten.native_layer_norm_backward(
        g, x, [3, 5], x.mean((1, 2), keepdim=True), x.var((1, 2), keepdim=True), None, None, [True, False, False]
    )[0],
}
ORDERS = [*itertools.permutations(range(3))]


def in_order(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """A tensor with the same elements, whose dimensions lie in memory in another order."""
    inverse = [order.index(dim) for dim in range(3)]
    return tensor.permute(order).contiguous().permute(inverse)


def tensors(device: torch.device, *orders: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [in_order(torch.randn(4, 3, 5), order).to(device) for order in orders]


@pytest.mark.pairwise(strength=2)
@pytest.mark.parametrize("second", ORDERS)
@pytest.mark.parametrize("first", ORDERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_strides_are_those_of_the_device(
    device: torch.device, name: str, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    fn = OPERATIONS[name]
    g, x = tensors(device, first, second)
    expected = fn(g, x)
    specs = [value.meta["spec"] for value in pygraph.trace(fn)(g, x).results]
    assert [spec.stride for spec in specs] == [one.stride() for one in pytree.tree_leaves(expected)]
    results = pygraph.jit(lambda g, x: fn(g, x))(g, x)
    assert all(map(torch.equal, pytree.tree_leaves(results), pytree.tree_leaves(expected)))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")  # of Dynamo's, which differ between versions
@pytest.mark.parametrize("way", ["step", "model", "backend"])
def test_a_view_that_eager_does_not_take(device: torch.device, way: str) -> None:
    """A softplus whose gradient is transposed: where it is taken for contiguous, a view of it fails on the device."""
    torch.manual_seed(0)
    net, weights = nn.Linear(4, 4).to(device), torch.randn(2, 4, 3).to(device)

    def loss_of(x: Tensor) -> Tensor:
        return (F.softplus(net(x)).transpose(1, 2) * weights).sum()

    def step(loss_of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        net.zero_grad()
        loss = loss_of(x)
        loss.backward()
        return loss.detach()

    fast: Callable[[Tensor], Tensor] = {
        "step": lambda: pygraph.jit(lambda x: step(loss_of, x)),
        "model": lambda: functools.partial(step, pygraph.jit(loss_of)),
        "backend": lambda: functools.partial(
            step, torch.compile(loss_of, backend=pygraph.backend, options={"fuse": device.type == "cuda"})
        ),
    }[way]()
    for _ in range(3):
        x = torch.randn(2, 3, 4).to(device)
        losses, gradients = [], []
        for fn in (functools.partial(step, loss_of), fast):
            losses.append(fn(x))
            gradients.append([parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None])
        torch.testing.assert_close(*losses)
        assert len(gradients[0]) == 2
        torch.testing.assert_close(*gradients)


def test_a_device_that_refuses(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description stays as it is; so it does for shapes that are symbols, and for indices."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(layouts, "_ones", fail)
    monkeypatch.setattr(layouts, "_known", {})
    g, x = tensors(device, (0, 2, 1), (0, 1, 2))
    assert pygraph.trace(OPERATIONS["sum"])(g, x) is not None
    assert set(map(len, layouts._known.values())) == {0}
    index = torch.zeros(4, 5, 3, dtype=torch.int64, device=device).transpose(1, 2)
    pygraph.trace(lambda g, i: torch.floor_divide(i, 2) + i)(g, index)
    assert not any("floor_divide" in str(key[0]) for key in layouts._known)
