"""Hooks of tensors that autograd calls inside a function: as in eager, whenever they come, go, or do something else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph


def records(kind: str, state: SimpleNamespace) -> Callable[[Any], Any]:
    """A hook with state of its own, which changes the gradient by a number that it reads at every call."""

    def hook(given: Any) -> Any:
        state.calls += 1
        state.log.append("called")
        gradient = given if kind == "register_hook" else given.grad
        state.average = gradient.clone() if state.average is None else state.average * 0.9 + gradient * 0.1
        if kind == "register_hook":
            return gradient * state.scale
        given.grad = gradient * state.scale
        return None

    return hook


def trained(
    device: torch.device, transform: Callable[[Any], Any], kind: str, *, inside: bool, early: bool, native: bool
) -> list[Any]:
    """What every call of a step leaves behind, with hooks that come and go between the calls."""
    net = nn.Linear(3, 1)
    with torch.no_grad():
        net.weight.fill_(0.5)
        net.bias.fill_(0.25)
    net.to(device)
    state = SimpleNamespace(calls=0, log=[], average=None, scale=2.0)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().mean()
        net.zero_grad()
        loss.backward()
        return loss.detach()

    def by_gradients(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(net(x).square().mean(), tuple(net.parameters()))

    call = transform(step if inside else by_gradients)
    register = getattr(net.weight, kind)
    handle = register(records(kind, state)) if early else None
    found: list[Any] = []
    for number in range(14):
        if number == 3 and not early:
            handle = register(records(kind, state))
        elif number == 6:
            state.scale = 3.0
        elif number == 9:
            assert handle is not None
            handle.remove()
        elif number == 11:
            register(lambda given: None)
        result = call(torch.full((2, 3), 1.0 + number % 2, device=device))
        gradients = [None if one.grad is None else one.grad.tolist() for one in net.parameters()]
        average = None if state.average is None else state.average.tolist()
        found.append(
            (torch.utils._pytree.tree_map(Tensor.tolist, result), gradients, state.calls, average, len(state.log))
        )
    return found


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("kind", "inside"),
    [("register_hook", True), ("register_hook", False), ("register_post_accumulate_grad_hook", True)],
)
def test_any_time(device: torch.device, kind: str, inside: bool, early: bool, native: bool) -> None:
    options = {"inside": inside, "early": early, "native": native}
    want = trained(device, lambda fn: fn, kind, **options)
    assert trained(device, pygraph.jit, kind, **options) == want


def test_steps_with_hooks_are_graphs(device: torch.device) -> None:
    weight = torch.ones(3, device=device, requires_grad=True)
    weight.register_hook(lambda gradient: gradient.clamp(-1, 1))

    @pygraph.jit(strict=True)
    def step(x: Tensor) -> Tensor:
        weight.grad = None
        loss = (weight * x).sum()
        loss.backward()
        return loss.detach()

    for number in range(4):
        step(torch.full((3,), float(number), device=device))
        assert weight.grad is not None
        assert weight.grad.tolist() == [min(number, 1)] * 3
    assert step.cache_info()[:2] == (2, 2)  # one more, as there was no gradient before


@pytest.mark.parametrize("early", [True, False])
def test_an_argument_that_is_differentiated_inside(device: torch.device, early: bool, native: bool) -> None:
    called: list[int] = []

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad((x * x).sum(), x)[0]

    fast = pygraph.jit(gradient)
    for number in range(8):
        x = torch.ones(2, device=device, requires_grad=True)
        is_hooked = bool(number % 2) == early
        if is_hooked:
            x.register_hook(lambda given: (called.append(1), given * 10)[1])
        assert fast(x).tolist() == [20.0 if is_hooked else 2.0] * 2
    assert len(called) == 4


def test_a_gradient_from_outside_calls_them_itself(device: torch.device) -> None:
    """Such hooks are not part of what the function does: no change of them is another kind of calls."""
    weight = torch.ones(3, device=device, requires_grad=True)
    log: list[Tensor] = []
    fast = pygraph.jit(lambda x: (weight * x).sum())
    for number in range(6):
        if number == 2:
            weight.register_hook(lambda gradient: log.append(gradient) or gradient * 2)
        weight.grad = None
        fast(torch.ones(3, device=device)).backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0 if number > 1 else 1.0] * 3
    assert len(log) == 4
    assert fast.cache_info()[:2] == (5, 1)


def test_a_hook_may_be_the_optimizer(device: torch.device, native: bool) -> None:
    """As in steps that update each parameter as soon as its gradient is there."""

    def trained(transform: Callable[[Any], Any]) -> list[Any]:
        net = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            net.weight.fill_(0.5)
        net.to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def update(parameter: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        net.weight.register_post_accumulate_grad_hook(update)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = net(x).square().mean()
            loss.backward()
            return loss.detach()

        call = transform(step)
        return [
            (call(torch.full((2, 3), 0.1, device=device)).item(), net.weight.tolist(), net.weight.grad)
            for _ in range(6)
        ]

    assert trained(pygraph.jit) == trained(lambda fn: fn)


def hooked(weight: Tensor, log: list[int]) -> Any:
    return weight.register_hook(lambda gradient: log.append(0) or gradient * 2)


def hooked_at_the_end(weight: Tensor, log: list[int]) -> Any:
    return weight.register_post_accumulate_grad_hook(lambda parameter: log.append(0))


def hooked_together(weight: Tensor, log: list[int]) -> Any:
    return torch.autograd.graph.register_multi_grad_hook((weight,), lambda gradients: log.append(0))


@pytest.mark.parametrize("stays", [False, True], ids=["removed", "stays"])
@pytest.mark.parametrize("register", [hooked, hooked_at_the_end, hooked_together], ids=lambda one: one.__name__)
def test_a_function_that_registers_hooks_does_so_once_a_call(
    device: torch.device, register: Callable[..., Any], stays: bool
) -> None:
    """The trace would leave a hook of its own, which is called at every backward from then on."""

    def trained(run: Callable[..., Any]) -> list[Any]:
        weight, log = torch.full((3,), 0.5, device=device, requires_grad=True), list[int]()

        def step(x: Tensor) -> None:
            handle = register(weight, log)
            (weight * x).sum().backward()
            if not stays:
                handle.remove()

        call, found = run(step), list[Any]()
        for _ in range(5):
            weight.grad = None
            call(torch.ones(3, device=device))
            assert weight.grad is not None
            found.append((weight.grad.tolist(), len(log)))
        weight.grad = None
        (weight * 1).sum().backward()
        assert weight.grad is not None
        return [*found, weight.grad.tolist(), len(log)]

    assert trained(pygraph.jit) == trained(lambda fn: fn)
