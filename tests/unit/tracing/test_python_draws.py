"""Draws of Python's random and of NumPy's global generator: the numbers, and the generators' states, are eager's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pygraph

CALLS = 10


def on(x: Tensor, array: Any) -> Tensor:
    return torch.from_numpy(array).to(x.device)


def mixed(x: Tensor) -> Tensor:
    share = np.random.beta(0.2, 0.2)
    return x * share + (1 - share) * x[torch.randperm(8, device="cpu").to(x.device)]


def shuffled(x: Tensor) -> Tensor:
    order = list(range(8))
    random.shuffle(order)
    return x[order[:4]]


def differentiated(x: Tensor) -> Tensor:
    w = x.clone().requires_grad_()
    h = w * 2
    if random.random() < 0.5:
        h = h * 3
    return torch.autograd.grad((h * np.random.beta(1, 2)).sum(), w)[0]


def asked_before(x: Tensor) -> Tensor:
    first = np.random.rand()
    y = x * 2 if x.sum() > 140 else x + random.random()
    return y * first + torch.rand(3, device="cpu").to(x.device) * random.random()


def updated_before(h: Tensor, x: Tensor) -> Tensor:
    """What is drawn is put on the device between an update and a decision by what is drawn next."""
    h.add_(1)
    x = x * torch.tensor([random.random(), 1.0, 1.0], device=x.device)
    if random.random() < 0.5:
        x = x * 2
    return x[[random.randint(0, 1)]] + h


GRAPHS: dict[str, Callable[[Tensor], Any]] = {
    "random": lambda x: x * random.random(),
    "uniform": lambda x: x * random.uniform(1, 3) + np.random.uniform(0, 2),
    "gauss": lambda x: x * random.gauss(0, 1) * random.normalvariate(0, 1) * random.betavariate(1, 2),
    "normal": lambda x: x * np.random.normal(0, 1) + np.random.randn() + np.random.random(),
    "randint": lambda x: x + random.randint(0, 5) + np.random.randint(0, 9) + np.random.randint(4),
    "decision": lambda x: x * 2 if random.random() < 0.5 else x - 1,
    "decisions": lambda x: (x * 2 if random.random() < 0.5 else x - 1) + (x.cos() if np.random.rand() < 0.5 else 1),
    "arrays": lambda x: x[np.random.randint(0, 8, 4)] * torch.as_tensor(np.random.rand(4, 3)).to(x.device).float(),
    "sizes": lambda x: x + on(x, np.random.normal(size=(8, 3))) + on(x, np.random.uniform(1.0, 2.0, 3)),
    "permutation": lambda x: x[on(x, np.random.permutation(8))],
    "sample": lambda x: x[random.sample(range(8), 4)] + x[random.sample([1, 5, 7, 2], 4)],
    "unused": lambda x: (random.random(), x * 2)[1],
    "of all generators": lambda x: x * random.random() + torch.rand(3, device="cpu").to(x.device) * np.random.random(),
    "mixed": mixed,
    "shuffled": shuffled,
    "differentiated": differentiated,
    "asked before": asked_before,
}  # fmt: skip
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "many": lambda x: x * sum(random.random() for _ in range(6)),
    "choice": lambda x: x * random.choice([1, 2, 3]),
    "choice and a question": lambda x: x * random.choice([1, 2, 3]) if x.sum() > 140 else x - random.randrange(5),
    "choices and a question": lambda x: (x[random.choices(range(8), k=2)], (x.mean() > 6).item()),
    "a draw, choice and a question": lambda x: x * random.random() * random.choice([1, 2]) * (x.sum() > 140).item(),
    "by keyword": lambda x: x * np.random.uniform(high=2.0) + np.random.beta(b=1, a=2),
    "of numbers that are live": lambda x: x * random.uniform(0, x.sum().item()),
    "numpy choice": lambda x: x[np.random.choice(8, 3)],
    "shuffled array": lambda x: x[on(x, in_place(np.arange(8)))],
    "sampled texts": lambda x: x * len(random.sample(["a", "bb", "ccc"], 1)[0]),
}


def in_place(array: np.ndarray) -> np.ndarray:
    np.random.shuffle(array)
    return array


def run(function: Callable[[Tensor], Any], device: torch.device) -> tuple[list[Any], Any]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    x = torch.arange(24.0, device=device).view(8, 3)
    found = [function(x + k - 5) for k in range(CALLS)]
    return found, (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]


@pytest.mark.parametrize("kind", [*GRAPHS, *OTHERS])
def test_draws_are_those_of_eager(device: torch.device, kind: str) -> None:
    run(pygraph.jit(GRAPHS["random"]), device)  # from now on, states of these generators are read and put back
    function = GRAPHS.get(kind) or OTHERS[kind]
    fast = pygraph.jit(function)
    (found, state), (expected, expected_state) = run(fast, device), run(function, device)
    torch.testing.assert_close(found, expected)
    assert state == expected_state
    if kind in GRAPHS:
        assert 1 <= fast.cache_info().captures <= 4


@pytest.mark.parametrize("kind", ["random", "decision", "arrays"])
def test_draws_that_autograd_differentiates(device: torch.device, kind: str) -> None:
    w = torch.linspace(0.5, 1, 3, device=device, requires_grad=True)

    def step(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        w.grad = None
        function(x).square().sum().backward()
        assert w.grad is not None
        return w.grad

    def forward(x: Tensor) -> Tensor:
        return GRAPHS[kind](x * w)

    fast = pygraph.jit(forward)
    found, state = run(lambda x: step(fast, x), device)
    expected, expected_state = run(lambda x: step(forward, x), device)
    torch.testing.assert_close(found, expected)
    assert state == expected_state


def test_an_update_before_draws_and_decisions(device: torch.device) -> None:
    found: list[Any] = []
    for decorate in (lambda fn: fn, pygraph.jit):
        h = torch.zeros(3, device=device)
        function = decorate(lambda x, h=h: updated_before(h, x))
        found.append([*run(function, device), h])
    torch.testing.assert_close(*found)


def test_a_wrong_draw_is_eagers_error(device: torch.device) -> None:
    fast, x = pygraph.jit(lambda x, a, b: x * random.randint(a, b)), torch.ones(2, device=device)
    for _ in range(3):
        with pytest.raises(ValueError, match="empty range"):
            fast(x, 5, 1)
    assert fast(x, 2, 2).tolist() == [2.0, 2.0]
    for function, text in (
        (lambda x: x * random.sample(range(3), 4)[0], "arger than population"),
        (lambda x: x * random.randint(5, 1), "empty range"),
        (lambda x: x * np.random.randint(5, 1), "low >= high"),
    ):
        fixed = pygraph.jit(function)
        for _ in range(3):
            with pytest.raises(ValueError, match=text):
                fixed(x)


def test_other_functions_in_their_places_are_called(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = pygraph.jit(lambda x: x * random.random() + np.random.rand()), torch.ones(2, device=device)
    fast(x)
    monkeypatch.setattr(random, "random", lambda: 2.0)
    monkeypatch.setattr(np.random, "rand", lambda: 3.0)
    for _ in range(3):
        assert fast(x).tolist() == [5.0, 5.0]
