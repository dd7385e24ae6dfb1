"""Scalars of the host below ``torch.compile``: one graph, in which they are numbers that each call refreshes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pygraph
from pygraph.interop import live
from pygraph.process import extension
from tests.unit.native.test_replay import Fake
from tests.unit.native.test_replay import fake as fake  # a fixture

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore"),  # of Dynamo's and Inductor's, which differ between versions
]

LAYERS = 6


class Attention(nn.Module):
    """A layer of speech_transformer's: its temperature is a number of NumPy's.

    With ``chain``, the call computes the temperature from another number.
    """

    def __init__(self, width: int, heads: int, chain: bool) -> None:
        super().__init__()
        self.heads, self.chain = heads, chain
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.temperature: Any = np.power(width // heads, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = (layer(x).view(batch, length, self.heads, -1) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        temperature = np.sqrt(self.temperature) * 2 if self.chain else self.temperature
        weights = torch.softmax(query @ key.transpose(-1, -2) / temperature, -1)
        return x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


def attention(device: torch.device, width: int = 8, heads: int = 2, chain: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(width, heads, chain) for _ in range(LAYERS))).to(device)


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend=pygraph.backend, options=options or None)


def regions() -> dict[str, list[str]]:
    """The kinds of regions of all that is compiled now, by ``inference``, ``forward`` and ``backward``."""
    found: dict[str, list[str]] = {}
    for call in pygraph.explain().calls:
        found.setdefault(call.function.partition(" ")[0], []).append(" ".join(region.kind for region in call.regions))
    return found


def check_one_graph(*kinds: str) -> None:
    """All that is compiled is one graph per kind, and nothing runs besides."""
    report = pygraph.explain()
    assert regions() == {kind: ["graph"] for kind in kinds}, str(report)
    assert not report.to_dict()["fallbacks"], str(report)


def captures() -> int:
    return sum(function.cache_info().captures for replay in live.CALLABLES for function in replay.functions())


def test_a_stack_of_attention(device: torch.device) -> None:
    model = attention(device)
    fast = compiled(model)
    x = torch.randn(2, 3, 8).to(device)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))
        check_one_graph("inference")
        before = captures()
        for value in (1.0, 100.0, 0.25, 3.0):
            for number, layer in enumerate(model):
                layer.temperature = np.float64(value + number)
            torch.testing.assert_close(fast(x), model(x))
        assert captures() == before
        check_one_graph("inference")


def test_calls_run_in_cpp(fake: Fake) -> None:
    model = attention(torch.device("emu"))
    fast = compiled(model)
    with torch.no_grad():
        for number in range(8):
            for layer in model:
                layer.temperature = np.float64(number + 0.5)
            x = torch.randn(2, 3, 8, device="emu")
            torch.testing.assert_close(fast(x), model(x))
    assert len(fake.launches) == 6, "all calls but the first two"


def train(fn: Any, args: list[Any]) -> list[torch.Tensor]:
    """Results and gradients."""
    args = [arg.detach().clone().requires_grad_(arg.requires_grad) if torch.is_tensor(arg) else arg for arg in args]
    result = fn(*args)
    result.sum().backward()
    return [result, *(arg.grad for arg in args if torch.is_tensor(arg) and arg.requires_grad)]


SCALARS = {
    "float64": lambda i: torch.tensor(i + 0.5, dtype=torch.float64),
    "float32": lambda i: torch.tensor(i + 0.5),
    "int64": lambda i: torch.tensor(i + 1),
    "numpy float64": lambda i: np.float64(i + 0.5),
    "numpy float32": lambda i: np.float32(i + 0.5),
    "numpy int64": lambda i: np.int64(i + 1),
    "requires_grad": lambda i: torch.tensor(i + 0.5, requires_grad=True),
}
FUNCTIONS = {
    "quotient": lambda x, k: torch.softmax(x.sin() / k, -1) * x,
    "product": lambda x, k: (x * k).tanh() * x,
    "sum": lambda x, k: ((x + k) * x).tanh(),
    "twice": lambda x, k: (x * k).tanh() + k,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", SCALARS)
def test_training(device: torch.device, kind: str, function: str) -> None:
    fn = FUNCTIONS[function]
    fast = compiled(fn)
    for i in range(4):
        args = [torch.randn(3, 4).to(device).requires_grad_(), SCALARS[kind](i)]
        torch.testing.assert_close(train(fast, args), train(fn, args))
    print(regions())
