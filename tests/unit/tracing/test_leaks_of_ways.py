"""Nothing fake survives a trace, whichever way it was made: `torch.compile`, transforms, autograd, steps, nesting."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call, grad, jvp, vmap
from torch.utils import _pytree as pytree

import pygraph
from tests import extent
from tests.fakes import assert_no_fake_left
from tests.unit.tracing.test_leaks import comparable

pytestmark = [pytest.mark.rotates, pytest.mark.heap]

Tensor = torch.Tensor
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Scale = tuple[Callable[[Tensor], Tensor], Callable[[], Any]]


# ---- holders: each is a function of a tensor, which remembers, and what tells what it holds -----------------------


def an_lru_cache(device: torch.device) -> Scale:
    """A table behind functools.lru_cache."""

    @functools.lru_cache
    def table(n: int) -> dict[str, Any]:
        made: dict[str, Any] = {"all": torch.arange(n, device=device) * 1.0}
        made["last"] = [made["all"][-1:]]
        return made

    return lambda x: table(3)["all"] * x + table(3)["last"][0], lambda: (dict(table(3)), table.cache_info().currsize)


def a_dict(device: torch.device) -> Scale:
    """A table in a dict."""
    tables: dict[int, Tensor] = {}

    def scale(x: Tensor) -> Tensor:
        if 3 not in tables:
            tables[3] = torch.arange(3, device=device) * 1.0
        return x * tables[3]

    return scale, lambda: dict(tables)


def an_unknown_dict(device: torch.device) -> Scale:
    """The same, where the walk over what a function reaches does not find it."""
    tables: dict[int, Tensor] = {}
    get, put = tables.get, tables.setdefault

    def scale(x: Tensor) -> Tensor:
        if get(3) is None:
            put(3, torch.arange(3, device=device) * 1.0)
        return x * put(3, torch.zeros(3))

    return scale, lambda: dict(tables)


def a_thread_local(device: torch.device) -> Scale:
    """A table of this thread."""
    local = threading.local()

    def scale(x: Tensor) -> Tensor:
        if not hasattr(local, "table"):
            local.table = torch.arange(3, device=device) * 1.0
        return x * local.table

    return scale, lambda: vars(local)


def a_memo_beside_a_log(device: torch.device) -> Scale:
    """A table, and a count of calls in a place that is not known."""
    counted = collections.Counter[str]()
    count = counted.update

    @functools.cache
    def table(n: int) -> Tensor:
        count(["made"])
        return torch.arange(n, device=device) * 1.0

    return lambda x: x * table(3), lambda: (table(3), dict(counted))


HOLDERS: dict[str, Callable[[torch.device], Scale]] = {
    holder.__name__: holder for holder in (an_lru_cache, a_dict, an_unknown_dict, a_thread_local, a_memo_beside_a_log)
}


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    """Dynamo keeps fakes of what it has compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- ways: each uses a function of a tensor ------------------------------------------------------------------------


def called_without_gradients(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """As in inference."""
    with torch.no_grad():
        return wrap(scale)(x)


def differentiated(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """Under autograd, from outside."""
    leaf = x.clone().requires_grad_()
    result = wrap(scale)(leaf)
    result.square().sum().backward()
    return result.detach(), leaf.grad


def vmapped(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """Over rows."""
    return vmap(wrap(scale))(torch.stack([x, x + 1]))


def with_grad(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """The gradient by torch.func."""
    fast = wrap(scale)
    return grad(lambda t: fast(t).square().sum())(x)


def with_jvp(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """Forward mode."""
    return jvp(wrap(scale), (x,), (torch.ones_like(x),))


def rows_of_gradients(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """Two transforms."""
    fast = wrap(scale)
    return vmap(grad(lambda t: fast(t).square().sum()))(torch.stack([x, x + 1]))


def transformed_inside(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """A transform inside the function."""
    return wrap(lambda t: vmap(grad(lambda row: scale(row).square().sum()))(torch.stack([t, t + 1])))(x)


def nested(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """One compiled function in another."""
    inner = wrap(scale)
    return wrap(lambda t: inner(t) + inner(t + 1))(x)


def nested_and_differentiated(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """The same under autograd."""
    leaf = x.clone().requires_grad_()
    inner = wrap(scale)
    wrap(lambda t: (inner(t) * t).sum())(leaf).backward()
    return leaf.grad


class Net(nn.Module):
    """A module that scales what a layer gives."""

    def __init__(self, scale: Callable[[Tensor], Tensor], device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 3).to(device)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """The layer, scaled."""
        return self.scale(self.inner(x))


def as_functional_call(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """A module with parameters that are passed."""
    net = Net(scale, x.device)
    parameters = {name: (value.detach() * 2) for name, value in net.named_parameters()}
    return wrap(lambda p, t: functional_call(net, p, (t,)))(parameters, x)


def as_step(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """A whole step of training, whose loss function keeps a log."""
    net = Net(scale, x.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses: list[Tensor] = []
    keep = losses.append

    def step(t: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(t).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = wrap(step)
    for index in range(5):
        keep(fast(x + index))
    return losses, [p.detach().clone() for p in net.parameters()]


def as_logging_step(scale: Callable[[Tensor], Tensor], x: Tensor, wrap: Wrap) -> Any:
    """The same with the log inside of the step, in a list and in an attribute."""
    net = Net(scale, x.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses: list[Tensor] = []
    keep, last = losses.append, threading.local()

    def step(t: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(t).square().mean()
        loss.backward()
        optimizer.step()
        keep(loss.detach())
        last.loss = loss.detach()
        return loss.detach()

    fast = wrap(step)
    found = [fast(x + index) for index in range(5)]
    return found, losses, last.loss, [p.detach().clone() for p in net.parameters()]


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor, Wrap], Any]] = {
    way.__name__: way for way in (
        called_without_gradients, differentiated, vmapped, with_grad, with_jvp, rows_of_gradients, transformed_inside,
        nested, nested_and_differentiated, as_functional_call, as_step, as_logging_step,
    )
}  # fmt: skip


def rounded(value: Any) -> Any:
    """What is compared: results of other kernels differ in the last bits."""
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value


def assert_close(found: Any, expected: Any) -> None:
    """Compare nested lists of numbers."""
    left, tree = pytree.tree_flatten(comparable(found))
    right, expected_tree = pytree.tree_flatten(comparable(expected))
    assert tree == expected_tree
    assert left == list(map(rounded, right))


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HOLDERS)
def test_ways(device: torch.device, name: str, way: str) -> None:
    scale, found = HOLDERS[name](device)
    plain, expected = HOLDERS[name](device)
    for value in (1.0, 2.0, 3.0)[: extent.examples(2, 3)]:
        x = torch.full((3,), value, device=device)
        assert_close(WAYS[way](scale, x, pygraph.jit), WAYS[way](plain, x, lambda fn: fn))
        assert_close(found(), expected())
        assert_no_fake_left()


@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore::UserWarning")  # of Dynamo's, which looks into functions with a cache
@pytest.mark.parametrize(
    "name", sorted(HOLDERS.keys() - {"a_memo_beside_a_log"})
)  # Dynamo ignores caches, so that it counts 2
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "with a graph break"])
def test_below_dynamo(device: torch.device, name: str, training: bool, is_broken: bool) -> None:
    scale, found = HOLDERS[name](device)
    plain, expected = HOLDERS[name](device)

    def fn(x: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
        y = x * 2
        if is_broken:
            torch._dynamo.graph_break()
        return scale(y) + 1

    fast = torch.compile(fn, backend=pygraph.backend)
    for value in (1.0, 2.0, 3.0)[: extent.examples(2, 3)]:
        x, y = (torch.full((3,), value, device=device, requires_grad=training) for _ in range(2))
        result, other = fast(x, scale), fn(y, plain)
        assert_close(result.detach(), other.detach())
        if training:
            result.sum().backward()
            other.sum().backward()
            assert_close(x.grad, y.grad)
        assert_no_fake_in(found())
        assert_close(found(), expected())


def assert_no_fake_in(value: Any) -> None:
    """Dynamo keeps some of its own elsewhere, whatever the backend."""
    assert not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))


@pytest.mark.parametrize("name", HOLDERS)
def test_graphed_callables(device: torch.device, name: str) -> None:
    (scale, found), (plain, expected) = HOLDERS[name](device), HOLDERS[name](device)
    graphed, net = Net(scale, device), Net(plain, device)
    x = torch.ones(3, device=device, requires_grad=True)
    pygraph.make_graphed_callables(graphed, (x,))
    for _ in range(extent.examples(2, 3)):
        for module in (graphed, net):
            module.zero_grad()
            module(x).square().sum().backward()
        assert_close([p.grad for p in graphed.parameters()], [p.grad for p in net.parameters()])
    assert_close(found(), expected())
    assert_no_fake_left()
