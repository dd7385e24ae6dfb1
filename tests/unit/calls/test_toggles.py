"""Calls that change whether parameters require grad: they are left as eager leaves them, and so are gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.errors import GradientChangeError, TraceError
from tests.steps import assert_same, no_synchronization

Make = Callable[[nn.Module, nn.Module], Callable[..., Any]]


def networks(device: torch.device) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(device)
    return first, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)


def state(*nets: nn.Module) -> list[Any]:
    """Parameters, gradients and flags."""
    return [
        (p.detach().clone(), None if p.grad is None else p.grad.clone(), p.requires_grad)
        for net in nets
        for p in net.parameters()
    ]


def run(device: torch.device, make: Make, jitted: bool, steps: int = 10) -> tuple[list[Any], Any]:
    """What every call returned and left behind, and the step."""
    nets = networks(device)
    step = make(*nets)
    step = pygraph.jit(step) if jitted else step
    torch.manual_seed(2)
    found: list[Any] = []
    for _ in range(steps):
        result = step(torch.randn(6, 4, device=device), torch.randn(6, 4, device=device))
        found.append((result, state(*nets)))
    return found, step


def check(device: torch.device, make: Make, hits: int, steps: int = 10) -> Any:
    """Compare a jitted step with eager, and expect so many replays."""
    expected, _ = run(device, make, False, steps)
    found, fast = run(device, make, True, steps)
    assert_same(found, expected, device)
    assert fast.cache_info().hits == hits, (fast.cache_info(), str(fast.explain()))
    return fast


def adversarial(generator: nn.Module, critic: nn.Module, freeze: bool, thaw: bool) -> Callable[..., Any]:
    """A step of both networks, which leaves the critic frozen or thawed."""
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (generator, critic)]

    def step(real: Tensor, noise: Tensor) -> Any:
        fake = generator(noise)
        critic.requires_grad_(True)
        optimizers[1].zero_grad()
        wrong = critic(fake.detach()).mean() - critic(real).mean()
        wrong.backward()
        optimizers[1].step()
        if freeze:
            for parameter in critic.parameters():
                parameter.requires_grad = False
        optimizers[0].zero_grad()
        loss = -critic(fake).mean()
        loss.backward()
        optimizers[0].step()
        if thaw:
            critic.requires_grad_(True)
        return wrong.detach(), loss.detach()

    return step


@pytest.mark.parametrize("thaw", [True, False])
def test_a_critic_that_is_frozen_for_a_while(device: torch.device, thaw: bool) -> None:
    fast = check(device, lambda g, c: adversarial(g, c, freeze=True, thaw=thaw), hits=8)
    assert "no fallbacks" in str(fast.explain())


def test_steps_that_freeze_what_the_other_one_thaws(device: torch.device) -> None:
    """Each leaves other flags behind than it finds."""

    def train(jitted: bool) -> tuple[list[Any], list[Any]]:
        generator, critic = networks(device)
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (generator, critic)]

        def step_critic(real: Tensor, noise: Tensor) -> Tensor:
            generator.requires_grad_(False)
            critic.requires_grad_(True)
            optimizers[1].zero_grad()
            loss = critic(generator(noise)).mean() - critic(real).mean()
            loss.backward()
            optimizers[1].step()
            return loss.detach()

        def step_generator(noise: Tensor) -> Tensor:
            generator.requires_grad_(True)
            critic.requires_grad_(False)
            optimizers[0].zero_grad()
            loss = -critic(generator(noise)).mean()
            loss.backward()
            optimizers[0].step()
            return loss.detach()

        steps: list[Any] = [pygraph.jit(step) if jitted else step for step in (step_critic, step_generator)]
        torch.manual_seed(2)
        found: list[Any] = []
        for _ in range(12):
            real, noise = torch.randn(6, 4, device=device), torch.randn(6, 4, device=device)
            for step in steps:
                result = step(real, noise) if step is steps[0] else step(noise)
                found.append((result, state(generator, critic)))
        return found, steps

    expected, _ = train(False)
    found, steps = train(True)
    assert_same(found, expected, device)
    for step in steps:
        assert step.cache_info().hits >= 8
        assert "no fallbacks" in str(step.explain())


def test_flags_that_somebody_else_changes_between_calls(device: torch.device) -> None:
    """A call that leaves flags as it found them once does not do so where it finds others."""

    def make(first: nn.Module, second: nn.Module) -> Callable[..., Any]:
        unused = nn.Parameter(torch.ones(2, device=device))
        second.register_parameter("unused", unused)

        def step(x: Tensor, y: Tensor) -> Tensor:
            second.requires_grad_(False)
            return first(x) + second(y)

        return lambda x, y: step(x, y).detach()

    nets = networks(device)
    step = make(*nets)
    fast, x = pygraph.jit(step), torch.ones(6, 4, device=device)
    for call in range(12):
        thawed = call in (4, 5, 9)
        nets[1].requires_grad_(thawed)
        fast(x, x)
        assert not any(parameter.requires_grad for parameter in nets[1].parameters()), call
    assert fast.cache_info().hits >= 6


def test_gradients_of_what_is_frozen(device: torch.device) -> None:
    """They may be deleted, too, which a trace once did for good."""

    def make(first: nn.Module, second: nn.Module) -> Callable[..., Any]:
        second(torch.ones(1, 4, device=device)).sum().backward()
        second.requires_grad_(False)

        def step(x: Tensor, y: Tensor) -> Tensor:
            second.zero_grad()
            return first(second(x) * y).detach()

        return step

    check(device, make, hits=8)


def test_a_trace_puts_gradients_of_what_is_frozen_back(device: torch.device) -> None:
    _, net = networks(device)
    net(torch.ones(1, 4, device=device)).sum().backward()
    net.requires_grad_(False)
    gradients = [parameter.grad for parameter in net.parameters()]

    def step(x: Tensor) -> Tensor:
        net.zero_grad()
        return net(x)

    with pytest.raises(GradientChangeError):
        pygraph.trace(step)(torch.ones(2, 4, device=device))
    assert all(p.grad is before for p, before in zip(net.parameters(), gradients, strict=True))


def test_gradients_accumulate_in_what_was_thawed(device: torch.device) -> None:
    """A backward that adds to the gradient of a parameter that was frozen when the call began."""

    def make(first: nn.Module, second: nn.Module) -> Callable[..., Any]:
        second.requires_grad_(False)

        def step(x: Tensor, y: Tensor) -> Tensor:
            second.requires_grad_(True)
            loss = second(first(x) * y).square().mean()
            loss.backward()
            second.requires_grad_(False)
            return loss.detach()

        return step

    fast = check(device, make, hits=8)
    assert "no fallbacks" in str(fast.explain())


def test_frozen_inside_and_differentiated_outside(device: torch.device) -> None:
    def train(jitted: bool) -> list[Any]:
        first, second = networks(device)

        def forward(x: Tensor) -> Tensor:
            second.requires_grad_(False)
            out = second(first(x))
            second.requires_grad_(True)
            return out

        fast = pygraph.jit(forward) if jitted else forward
        torch.manual_seed(2)
        found: list[Any] = []
        for _ in range(6):
            fast(torch.randn(6, 4, device=device)).sum().backward()
            found.append(state(first, second))
        return found

    assert_same(train(True), train(False), device)


def test_nothing_is_left_of_a_trace_that_fails(device: torch.device) -> None:
    first, _ = networks(device)

    def step(x: Tensor) -> Tensor:
        first.requires_grad_(False)
        raise ValueError("on purpose")

    with pytest.raises(TraceError):
        pygraph.trace(step)(torch.ones(2, 4, device=device))
    assert all(parameter.requires_grad for parameter in first.parameters())


def test_replays_wait_for_nothing(device: torch.device) -> None:
    step = pygraph.jit(adversarial(*networks(device), freeze=True, thaw=False))
    x = torch.ones(6, 4, device=device)
    for _ in range(5):
        step(x, x)
    with no_synchronization(device):
        step(x, x)


def test_an_argument_is_not_changed(device: torch.device) -> None:
    """The caller's tensor would have to be another object's; eager does it, and the reason says what to do instead."""
    fast = pygraph.jit(lambda x: (x.requires_grad_(True) * 2).detach())
    x = torch.ones(3, device=device)
    fast(x)
    assert x.requires_grad
    (fallback,) = fast.explain().to_dict()["fallbacks"]
    assert "detach() or clone() it first" in fallback["reason"]
