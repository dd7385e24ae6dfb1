"""Calls that assign to ``.data`` of parameters: their memory is another one afterwards, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pygraph
from pygraph.errors import StateChangeError
from tests.steps import assert_same, no_synchronization

Make = Callable[[nn.Module, nn.Module], Callable[..., Any]]


def networks(device: torch.device) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    return first, copy.deepcopy(first)


def run(device: torch.device, make: Make, transform: Callable[[Any], Any], steps: int) -> tuple[Any, Any]:
    """What calls return and leave behind, and whether each parameter has its memory from before; and the step."""
    nets = networks(device)
    step = transform(make(*nets))
    torch.manual_seed(2)
    found: list[Any] = []
    parameters = [p for net in nets for p in net.parameters()]
    for _ in range(steps):
        held = [p.data for p in parameters]
        copies = [data.clone() for data in held]
        result = step(torch.randn(6, 4, device=device), torch.randint(0, 3, (6,), device=device))
        stays = [p.data_ptr() == data.data_ptr() for p, data in zip(parameters, held, strict=True)]
        kept = [torch.equal(data, then) for data, then in zip(held, copies, strict=True)]
        state = [(p.detach().clone(), p.grad, p.requires_grad) for p in parameters]
        found.append((result, torch.tensor(stays), torch.tensor(kept), state))
    return found, step


def check(device: torch.device, make: Make, hits: int, steps: int = 10) -> Any:
    expected, _ = run(device, make, lambda fn: fn, steps)
    found, fast = run(device, make, pygraph.jit, steps)
    assert_same(found, expected, device)
    assert fast.cache_info().hits >= hits, (fast.cache_info(), str(fast.explain()))
    assert "no fallbacks" in str(fast.explain())
    return fast


def descent(net: nn.Module, target: nn.Module) -> Callable[..., Any]:
    """Gradient descent without an optimizer."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        net.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        for parameter in net.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad
        return loss.detach()

    return step


def in_place(net: nn.Module, target: nn.Module) -> Callable[..., Any]:
    """The memory stays, as ``-=`` assigns what it has updated."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        net.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        for parameter in net.parameters():
            parameter.data -= 0.1 * parameter.grad
        return loss.detach()

    return step


def momentum(net: nn.Module, target: nn.Module) -> Callable[..., Any]:
    """A target network that follows, as in BYOL and MoCo."""
    target.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        for online, follows in zip(net.parameters(), target.parameters(), strict=True):
            follows.data = follows.data * 0.9 + online.data * 0.1
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), target(x)) + F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def sharpness_aware(net: nn.Module, target: nn.Module) -> Callable[..., Any]:
    """Two steps up and down: what was kept is the memory of the parameter afterwards."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    kept: dict[int, Tensor] = {}

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        with torch.no_grad():
            for index, parameter in enumerate(net.parameters()):
                kept[index] = parameter.data.clone()
                parameter.add_(parameter.grad, alpha=0.05)
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for index, parameter in enumerate(net.parameters()):
            parameter.data = kept[index]
        optimizer.step()
        net.zero_grad()
        return loss.detach()

    return step


def swapped_for_a_while(net: nn.Module, target: nn.Module) -> Callable[..., Any]:
    """Averages take the places of parameters for one evaluation."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        before = [parameter.data for parameter in net.parameters()]
        for parameter, average in zip(net.parameters(), target.parameters(), strict=True):
            average.data.mul_(0.9)
            parameter.data = average.data
        out = net(x).detach()
        for parameter, data in zip(net.parameters(), before, strict=True):
            parameter.data = data
        return out + net(x).detach()

    return step


def assigned_twice(net: nn.Module, target: nn.Module) -> Callable[..., Any]:
    """In between, operations and ``.data`` see what was assigned last."""
    first = next(net.parameters())

    def step(x: Tensor, y: Tensor) -> Any:
        first.data = first.data * 2
        out = net(x).detach()
        first.data.add_(1)
        first.data = first.data.clone() / 4
        return out, net(x).detach(), first.data.sum(), first.detach() + 1

    return step


MAKES = [descent, in_place, momentum, sharpness_aware, swapped_for_a_while, assigned_twice]


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_parameters_have_the_memory_that_eager_gives_them(device: torch.device, make: Make) -> None:
    check(device, make, hits=7)


def test_replays_wait_for_nothing(device: torch.device) -> None:
    fast = pygraph.jit(momentum(*networks(device)))
    x, y = torch.ones(6, 4, device=device), torch.zeros(6, dtype=torch.int64, device=device)
    for _ in range(5):
        fast(x, y)
    with no_synchronization(device):
        fast(x, y)


def test_a_trace_leaves_memory_as_it_was(device: torch.device) -> None:
    net, target = networks(device)
    before = [p.data_ptr() for p in net.parameters()]
    with pytest.raises(StateChangeError, match=r"\.data"):
        pygraph.trace(assigned_twice(net, target))(torch.ones(6, 4, device=device), None)
    assert [p.data_ptr() for p in net.parameters()] == before
    assert type(next(net.parameters()).data) is Tensor


def other_shape(weight: nn.Parameter, x: Tensor) -> None:
    weight.data = torch.cat([weight.data, x])


def other_dtype(weight: nn.Parameter, x: Tensor) -> None:
    weight.data = weight.data.double()


def the_argument(weight: nn.Parameter, x: Tensor) -> None:
    weight.data = x


def memory_of_another(weight: nn.Parameter, x: Tensor) -> None:
    weight.data = OTHER["weight"].data


OTHER: dict[str, Any] = {}


@pytest.mark.parametrize("assign", [other_shape, other_dtype, the_argument, memory_of_another])
def test_what_is_assigned(device: torch.device, assign: Callable[..., None]) -> None:
    """Graph or not: the memory, layout and values are eager's."""
    results: list[Any] = []
    for transform in (lambda fn: fn, pygraph.jit):
        torch.manual_seed(3)
        weight = nn.Parameter(torch.randn(3, device=device), requires_grad=False)
        OTHER["weight"] = nn.Parameter(torch.randn(3, device=device), requires_grad=False)

        def step(x: Tensor, weight: nn.Parameter = weight) -> Tensor:
            assign(weight, x)
            weight.mul_(0.5)
            return weight.sum()

        fast = transform(step)
        results.append([])
        for value in range(6):
            x = torch.full((3,), float(value), device=device)
            results[-1].append((fast(x), x, weight.detach().clone(), OTHER["weight"].detach().clone()))
            results[-1].append(torch.tensor(weight.data_ptr() == x.data_ptr()))
    assert_same(results[1], results[0], device)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("module", [True, False])
def test_differentiated_from_outside(device: torch.device, frozen: bool, module: bool) -> None:
    """A target that follows inside of the forward, as in MoCo; it may be one that requires grad, and gets none."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.target = networks(device)
            self.target.requires_grad_(not frozen)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for online, follows in zip(self.net.parameters(), self.target.parameters(), strict=True):
                    follows.data = follows.data * 0.9 + online.data * 0.1
                wanted = self.target(x)
            return F.mse_loss(self.net(x), wanted)

    results: list[Any] = []
    for transform in (lambda fn: fn, pygraph.jit):
        pair = Pair()
        fast, optimizer = transform(pair if module else pair.forward), torch.optim.SGD(pair.net.parameters(), 0.1)
        torch.manual_seed(4)
        results.append([])
        for _ in range(8):
            optimizer.zero_grad()
            loss = fast(torch.randn(5, 4, device=device))
            loss.backward()
            optimizer.step()
            results[-1].append((loss.detach(), copy.deepcopy(pair.state_dict())))
            assert all(p.grad is None and p.requires_grad != frozen for p in pair.target.parameters())
        info = fast.cache_info() if transform is pygraph.jit else None
    assert_same(results[1], results[0], device)
    assert info is not None
    assert info.hits >= 4, str(fast.explain())
    assert "no fallbacks" in str(fast.explain())


def test_a_tensor_with_another_memory_is_differentiated_from_outside(device: torch.device) -> None:
    """The gradient is that of the tensor itself, at the values that were assigned."""
    results: list[Any] = []
    for transform in (lambda fn: fn, pygraph.jit):
        weight = nn.Parameter(torch.ones(3, device=device))

        def step(x: Tensor, weight: nn.Parameter = weight) -> Tensor:
            weight.data = weight.data * 2
            return (weight.square() * x).sum()

        fast = transform(step)
        results.append([])
        for number in range(6):
            weight.grad = None
            fast(torch.full((3,), 1.0 + number, device=device)).backward()
            results[-1].append((weight.detach().clone(), weight.grad))
    assert_same(results[1], results[0], device)


@pytest.mark.parametrize("updates", [False, True])
def test_autograd_notices_updates_and_no_assignments(device: torch.device, updates: bool) -> None:
    """A graph from before the call has saved the parameter: eager raises an error if it was updated in place."""
    results: list[list[Any]] = []
    for transform in (lambda fn: fn, pygraph.jit):
        weight = nn.Parameter(torch.ones(3, device=device))

        def step(weight: nn.Parameter = weight) -> Tensor:
            weight.data = weight.data * 2
            if updates:
                with torch.no_grad():
                    weight.add_(1)
            return weight.detach().sum()

        fast = transform(step)
        results.append([])
        for _ in range(6):
            x = torch.ones(3, device=device, requires_grad=True)
            y = (weight * x).sum()
            fast()
            try:
                y.backward()
            except RuntimeError:
                results[-1].append(None)
            else:
                results[-1].append(x.grad)
    assert_same(results[1], results[0], device)
    assert (None in results[0]) == updates


@pytest.mark.parametrize("when", [2, 5])
def test_a_tensor_that_is_frozen_between_calls_is_trained_no_more(device: torch.device, when: int) -> None:
    def play(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        layers = [torch.randn(4, 3).to(device).requires_grad_(), torch.randn(3, 1).to(device).requires_grad_()]

        def step(x: torch.Tensor) -> None:
            ((x @ layers[0]).tanh() @ layers[1]).square().mean().backward()
            for layer in layers:
                if layer.grad is not None:
                    layer.data = layer.data - 0.1 * layer.grad
                layer.grad = None

        fn, found = wrap(step), list[Any]()
        for number in range(9):
            if number in (when, when + 3):
                layers[0].requires_grad_(number != when)
            fn(torch.full((8, 4), 0.1 + number).to(device))
            found.append([layer.sum().item() for layer in layers])
        return found

    for found, expected in zip(play(pygraph.jit), play(lambda function: function), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_modules_that_are_moved_to_where_they_are(device: torch.device, where: str) -> None:
    """As experts are by their mixture, ``expert.to(x.device)``: torch assigns the memory that they have."""
    nets = networks(device)

    def forward(x: Tensor, net: nn.Module) -> Tensor:
        return net.to(x.device).to(device.type, torch.float32).float()(x).square().sum()

    def step(x: Tensor, net: nn.Module) -> Tensor:
        if where == "outside":
            return forward(x, net)
        net.zero_grad()
        loss = forward(x, net)
        loss.backward()
        return loss

    fast = pygraph.jit(step)
    for number in range(6):
        x = torch.full((2, 4), 0.1 * number, device=device)
        if where == "outside":
            for net in nets:
                net.zero_grad()
        losses = [run(x, net) for run, net in zip((fast, step), nets, strict=True)]
        if where == "outside":
            for loss in losses:
                loss.backward()
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*([p.grad for p in net.parameters()] for net in nets))
    assert fast.cache_info().hits >= 4, str(fast.explain())
    assert "no fallbacks" in str(fast.explain())


def test_modules_that_are_moved_elsewhere_change(device: torch.device) -> None:
    net = networks(device)[0]
    fast = pygraph.jit(lambda x: net.to(torch.float64)(x.double()).sum())
    x = torch.ones(2, 4, device=device)
    for _ in range(3):
        assert fast(x).dtype is torch.float64
        assert all(p.dtype is torch.float64 for p in net.parameters())
        net.float()
