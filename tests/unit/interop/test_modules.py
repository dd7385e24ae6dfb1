"""Ways in which torch calls a module with other state, over a jitted module."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parametrizations, parametrize, stateless

import pygraph
from tests.unit.interop.common import arguments, check_compiled, check_same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))) * scale


@pytest.fixture
def pair(device: torch.device) -> tuple[Any, Net]:
    """A jitted module, called before, and one like it that is not jitted."""
    torch.manual_seed(0)
    reference = Net().to(device).eval()
    fast = pygraph.jit(copy.deepcopy(reference))
    with torch.no_grad():
        for _ in range(3):
            fast(arguments(device, 9)[0])
    return fast, reference


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return arguments(device, 0)[0]


def other_state(model: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator).to(p.device) for name, p in model.named_parameters()}


def check_afterwards(fast: Any, reference: Any, x: torch.Tensor) -> None:
    check_compiled(fast, lambda: fast(x), lambda: reference(x))


CALLS = {"torch.func": functional_call, "stateless": stateless.functional_call}


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.stateless.functional_call. is deprecated:FutureWarning")
@pytest.mark.parametrize("how", CALLS)
def test_functional_call(pair: tuple[Any, Net], x: torch.Tensor, how: str) -> None:
    fast, reference = pair
    for grad in (True, False):
        for seed in (1, 2, 1):
            state = other_state(reference, seed)
            with torch.set_grad_enabled(grad):
                got = CALLS[how](fast, state, (x,), {"scale": 2.0})
                check_same(got, CALLS[how](reference, state, (x,), {"scale": 2.0}))
    check_afterwards(fast, reference, x)


def test_functional_call_updates_the_buffers_that_it_is_given(pair: tuple[Any, Net], x: torch.Tensor) -> None:
    fast, reference = pair
    states = []
    for model in (fast, reference):
        model.train()
        state = {name: b.clone() for name, b in reference.named_buffers()}
        for _ in range(2):
            with torch.no_grad():
                functional_call(model, state, (x,))
        states.append(state)
        model.eval()
    check_same(*states)
    check_same(dict(fast.named_buffers()), dict(reference.named_buffers()))
    check_afterwards(fast, reference, x)


def test_gradients_of_a_functional_call(pair: tuple[Any, Net], x: torch.Tensor) -> None:
    fast, reference = pair
    state = other_state(reference)
    loss = lambda model: lambda state: functional_call(model, state, (x,)).square().sum()  # noqa: E731
    for _ in range(2):
        check_same(torch.func.grad(loss(fast))(state), torch.func.grad(loss(reference))(state))
        check_same(torch.func.jacrev(loss(fast))(state), torch.func.jacrev(loss(reference))(state))
    tangent = other_state(reference, 2)
    check_same(torch.func.jvp(loss(fast), (state,), (tangent,)), torch.func.jvp(loss(reference), (state,), (tangent,)))
    check_afterwards(fast, reference, x)


def test_gradients_of_each_sample(pair: tuple[Any, Net], device: torch.device) -> None:
    fast, reference = pair
    state = {name: p.detach() for name, p in reference.named_parameters()}
    rows, targets = arguments(device, 3, rows=5)[0], arguments(device, 4, rows=5)[0]

    def per_sample(model: Any) -> Any:
        def loss(state: Any, row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (functional_call(model, state, (row[None],)) - target).square().mean()

        return torch.vmap(torch.func.grad(loss), (None, 0, 0))(state, rows, targets)

    for _ in range(2):
        check_same(per_sample(fast), per_sample(reference))
    check_afterwards(fast, reference, rows)


def test_an_ensemble(pair: tuple[Any, Net], device: torch.device, x: torch.Tensor) -> None:
    fast, reference = pair
    models: list[nn.Module] = [Net().to(device).eval() for _ in range(3)]
    parameters, buffers = stack_module_state(models)

    def ensemble(model: Any) -> Any:
        return torch.vmap(lambda p, b, x: functional_call(model, (p, b), (x,)), (0, 0, None))(parameters, buffers, x)

    for _ in range(2):
        check_same(ensemble(fast), ensemble(reference))
    check_afterwards(fast, reference, x)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


def test_a_parametrization_of_the_module(pair: tuple[Any, Net], x: torch.Tensor) -> None:
    fast, reference = pair
    for model in (fast, reference):
        parametrize.register_parametrization(model.first, "weight", Symmetric())
        parametrizations.orthogonal(model.last)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            check_same(fast(x), reference(x))
            with parametrize.cached():
                check_same((fast(x), fast(x)), (reference(x), reference(x)))
    with torch.no_grad():
        for model in (fast, reference):
            model.first.parametrizations.weight.original.mul_(2)
        check_same(fast(x), reference(x))
    check_afterwards(fast, reference, x)
    for model in (fast, reference):
        parametrize.remove_parametrizations(model.first, "weight")
    check_afterwards(fast, reference, x)


def test_weight_and_spectral_norm(pair: tuple[Any, Net], x: torch.Tensor) -> None:
    fast, reference = pair
    for model in (fast, reference):
        parametrizations.weight_norm(model.first)
        torch.manual_seed(0)
        parametrizations.spectral_norm(model.last)
    for training in (True, False):
        for model in (fast, reference):
            model.train(training)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                check_same((fast(x), fast(x)), (reference(x), reference(x)))
    check_same(dict(fast.named_buffers()), dict(reference.named_buffers()))


def test_swapped_tensors(pair: tuple[Any, Net], x: torch.Tensor) -> None:
    fast, reference = pair
    state = other_state(reference, 5)
    for model in (fast, reference):
        model.load_state_dict({**model.state_dict(), **{k: v.clone() for k, v in state.items()}}, assign=True)
    check_afterwards(fast, reference, x)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


class Composition(nn.Module):
    """Jitted modules below a module, and one in two places."""

    def __init__(self, jit: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = jit(nn.Linear(4, 4))
        self.again = nn.ModuleList([self.first, nn.Sequential(jit(Net()))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again[1](self.again[0](self.first(x)))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_module_with_jitted_parts(device: torch.device, how: str) -> None:
    if how == "pickle" and device.type == "emu":  # whose tensors torch does not unpickle
        device = torch.device("cpu")
    x = arguments(device, 0)[0]
    mine, reference = (Composition(jit).to(device).eval() for jit in (pygraph.jit, lambda fn: fn))
    with torch.no_grad():
        check_same(mine(x), reference(x))
    copied = COPIES[how](mine)
    assert copied.again[0] is copied.first
    for _ in range(2):
        check_same(copied(x), reference(x))
        check_same(torch.vmap(copied)(x[None]), torch.vmap(reference)(x[None]))
    if how != "copy":
        with torch.no_grad():
            copied.first.weight.zero_()
    check_same(mine(x), reference(x))
    check_compiled(copied.first, lambda: copied.first(x), lambda: x @ copied.first.weight.t() + copied.first.bias)


def cube(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum()


@pygraph.jit
def jitted_cube(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum()


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_jitted_composition(device: torch.device, how: str) -> None:
    x = arguments(device, 0)[0]
    for fn, expected in (
        (pygraph.jit(torch.func.grad(cube)), torch.func.grad(cube)),
        (pygraph.jit(torch.vmap(jitted_cube)), torch.vmap(cube)),
    ):
        if how == "pickle":  # torch.func returns a local function, with jit and without
            with pytest.raises((AttributeError, pickle.PicklingError)):
                COPIES[how](fn)
            continue
        copied = COPIES[how](fn)
        check_compiled(copied, lambda copied=copied: copied(x), lambda expected=expected: expected(x))
    assert COPIES[how](jitted_cube) is jitted_cube
    check_same(torch.func.grad(COPIES[how](jitted_cube))(x), torch.func.grad(cube)(x))
