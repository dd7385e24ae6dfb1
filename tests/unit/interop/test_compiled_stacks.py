"""Stacks over a transformed function stay compiled: a second call neither traces nor captures anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from tests import extent
from tests.unit.interop.common import check_same, counted
from tests.unit.interop.test_stacks import STACKS, WRAPPERS, inputs, plain


def check_second_call_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    call: Callable[[Any, int], Any],
    function: Any,
    reference: Any,
) -> None:
    """``call(function, seed)`` is right; the first time it may compile, the second time it only replays."""
    with counted(monkeypatch, device) as first:
        check_same(call(function, 0), call(reference, 0))
    assert first.traces, "nothing was compiled"
    with counted(monkeypatch, device) as second:
        got = call(function, 1)
    check_same(got, call(reference, 1))
    assert (second.traces, second.captures) == (0, 0)
    assert second.replays, "nothing was replayed"


def test_the_counter_sees_traces_captures_and_replays(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    function = pygraph.jit(plain)
    with counted(monkeypatch, device) as first:
        function(*inputs(device, 0, 3))
    assert first.traces >= 1
    assert first.captures >= 1
    with counted(monkeypatch, device) as second:
        function(*inputs(device, 1, 3))
    assert (second.traces, second.captures, second.replays) == (0, 0, 1)


# torch's fakes forget where a product's zero tangent is inside vmap: these run as they are, and say so.
NOT_TRACED = {("jacfwd", "vmap"), ("hessian", "vmap"), ("grad_and_value", "jacfwd", "vmap", "grad")}


@pytest.mark.parametrize("stack", extent.third([s for s in STACKS if s not in NOT_TRACED]), ids="∘".join)
def test_jit_of_a_stack(monkeypatch: pytest.MonkeyPatch, device: torch.device, stack: tuple[str, ...]) -> None:
    """The stack is inside: one graph."""

    def build(transform: Callable[[Any], Any]) -> Any:
        fn: Any = plain
        for name in stack:
            fn = WRAPPERS[name](fn)
        return transform(fn)

    check_second_call_is_compiled(
        monkeypatch, device, lambda fn, seed: fn(*inputs(device, seed, 1, 2)), build(pygraph.jit), build(lambda fn: fn)
    )


# ---- outside: functions that are derived from the jitted one ------------------------------------------------------


# torch.func.functionalize has no rule for custom autograd functions: it is traced through.
OUTSIDE = [stack for stack in STACKS if "functionalize" not in stack]


@pytest.mark.parametrize("stack", extent.third(OUTSIDE), ids="∘".join)
def test_a_stack_over_a_jitted_function(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, stack: tuple[str, ...]
) -> None:
    def build(transform: Callable[[Any], Any]) -> Any:
        fn: Any = transform(plain)
        for name in stack:
            fn = WRAPPERS[name](fn)
        return fn

    check_second_call_is_compiled(
        monkeypatch, device, lambda fn, seed: fn(*inputs(device, seed, 1, 2)), build(pygraph.jit), build(lambda fn: fn)
    )


def _backward(fn: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    x, y = x.requires_grad_(), y.requires_grad_()
    out = fn(x, y)
    out.square().sum().backward()
    return out, x.grad, y.grad


def _twice(fn: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    x, y = x.requires_grad_(), y.requires_grad_()
    first = torch.autograd.grad(fn(x, y).sum(), (x, y), create_graph=True)
    return first, torch.autograd.grad(first[0].square().sum() + first[1].sum(), (x, y))


def _forward(fn: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.cos())
        return tuple(torch.autograd.forward_ad.unpack_dual(fn(dual, y)))


AMBIENT = {"backward": _backward, "two gradients": _twice, "forward mode": _forward}


@pytest.mark.parametrize("how", AMBIENT)
def test_ambient_autograd_over_a_jitted_function(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, how: str
) -> None:
    check_second_call_is_compiled(
        monkeypatch, device, lambda fn, seed: AMBIENT[how](fn, *inputs(device, seed, 2)), pygraph.jit(plain), plain
    )


def test_training_a_jitted_module(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)

    def step(model: Any, seed: int) -> Any:
        model.zero_grad(set_to_none=False)
        out = model(inputs(device, seed, 3)[0])
        out.square().mean().backward()
        return out, [p.grad.clone() for p in model.parameters()]

    step(model, 0)  # the gradients are there
    check_second_call_is_compiled(monkeypatch, device, step, pygraph.jit(model), model)
