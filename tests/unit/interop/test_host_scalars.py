"""Scalars of the host below ``torch.compile``: one graph, in which they are numbers that each call refreshes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pygraph
from pygraph.interop import live
from tests.unit.interop.common import OLD_DYNAMO  # which bakes in numbers of Python's that are floats
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


def train(fn: Any, args: list[Any]) -> list[Any]:
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


@pytest.mark.rotates
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", SCALARS)
def test_training(device: torch.device, kind: str, function: str) -> None:
    fn = FUNCTIONS[function]
    fast = compiled(fn)
    for i in range(4):
        args = [torch.randn(3, 4).to(device).requires_grad_(), SCALARS[kind](i)]
        torch.testing.assert_close(train(fast, args), train(fn, args))
    if kind == "requires_grad":  # its gradient is on the host, so that backward copies it there
        assert regions()["forward"] == ["graph"], str(pygraph.explain())
    else:
        check_one_graph("backward", "forward")


def check_calls(fn: Any, make: Any, **options: Any) -> None:
    """Four calls are as in eager."""
    fast = torch.compile(fn, backend=pygraph.backend, **options)
    for i in range(4):
        args = make(i)
        torch.testing.assert_close(fast(*args), fn(*args))


def f64(i: int) -> torch.Tensor:
    return torch.tensor(i + 1.5, dtype=torch.float64)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, k: x / k.to(x.device),
        lambda x, k: x / k.to(x.device, torch.float32),
        lambda x, k: torch.where(x > 0, x, k),
        lambda x, k: x.masked_fill(x > 0, k),
        lambda x, k: x.abs() ** k,
        lambda x, k: torch.zeros_like(x).fill_(k),
        lambda x, k: (x / k, k),
        lambda x, k: x / np.power(64, 0.5) + k,
    ],
)
def test_uses_of_a_scalar(device: torch.device, fn: Any) -> None:
    check_calls(fn, lambda i: (torch.randn(3, 4).to(device), f64(i)))
    check_one_graph("inference")


def test_a_scalar_that_is_returned_is_the_callers(device: torch.device) -> None:
    fast = compiled(lambda x, k: (x / k, k))
    for i in range(4):
        k = f64(i)
        assert fast(torch.randn(3).to(device), k)[1] is k


def test_dynamic_shapes(device: torch.device) -> None:
    check_calls(lambda x, k: x / k, lambda i: (torch.randn(3 + i, 4).to(device), f64(i)), dynamic=True)
    assert regions() == {"inference": ["graph"] * 4}, str(pygraph.explain())


@pytest.mark.parametrize("before", [True, False])
def test_a_scalar_that_is_updated(device: torch.device, before: bool) -> None:
    """Not of float64: all backends of torch's lose an update of that, also ``aot_eager`` (2.13)."""

    def fn(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if before:
            k.add_(1)
        y = x / k
        if not before:
            k.add_(1)
        return y

    fast, mine, theirs = compiled(fn), torch.tensor(1.5), torch.tensor(1.5)
    for i in range(5):
        x = torch.randn(4).to(device)
        torch.testing.assert_close(fast(x, mine), fn(x, theirs))
        torch.testing.assert_close(mine, theirs)
        if i > 1:  # the caller's updates count as well
            mine.fill_(i + 0.5)
            theirs.fill_(i + 0.5)


class Scaled(nn.Module):
    """A layer with a tensor and a buffer that stay on the host."""

    shift: torch.Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device=device)
        self.scale = torch.tensor(2.0)
        self.register_buffer("shift", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / self.scale + self.shift


def test_tensors_of_a_module(device: torch.device) -> None:
    model = Scaled(device)
    fast = compiled(model)
    x = torch.randn(2, 4).to(device)
    with torch.no_grad():
        for i in range(5):
            model.scale.fill_(i + 1.0)
            model.shift.fill_(i + 3.0)
            torch.testing.assert_close(fast(x), model(x))
        check_one_graph("inference")
        model.scale = torch.tensor(16.0)
        torch.testing.assert_close(fast(x), model(x))


ON_THE_DEVICE: dict[str, Any] = {
    "NumPy's": (lambda x, k: x / (np.abs(k) * 2), lambda i: np.float64(i + 1)),
    "tensors": (lambda x, k: x / (k.abs() * 2 + 1), f64),
    "a cast": (lambda x, k: x / k.float(), f64),
    "a choice": (lambda x, k: x * torch.where(k >= 2, k, -k), f64),
}


@pytest.mark.parametrize("kind", ON_THE_DEVICE)
def test_arithmetic_that_the_device_does(device: torch.device, kind: str) -> None:
    """Operations that have one result, by IEEE 754, are part of the graph."""
    fn, make = ON_THE_DEVICE[kind]
    fast = compiled(fn)
    for i in range(6):
        x = torch.randn(3, 4).to(device)
        torch.testing.assert_close(fast(x, make(i)), fn(x, make(i)))
    check_one_graph("inference")


RETURNED: dict[str, Any] = {
    "a sign": lambda x, k: (x * torch.where(k >= 0, 1.0, -1.0), k >= 0),
    "several": lambda x, k: (x / k, k + 1, (k + 1) * 2, k < 3),
    "constants": lambda x, k: (x + k, torch.full((), 2.0, dtype=torch.float64) * k),
}


@pytest.mark.parametrize("kind", RETURNED)
@pytest.mark.parametrize("grad", [False, True])
def test_scalars_that_are_returned(device: torch.device, kind: str, grad: bool) -> None:
    """They are computed from the inputs of the call, beside the one graph, and are new tensors at every call."""
    fn = RETURNED[kind]
    fast = compiled(fn)
    held: list[Any] = []
    for i in range(5):
        x = torch.randn(3, 4).to(device).requires_grad_(grad)
        found, expected = fast(x, f64(i - 2)), fn(x, f64(i - 2))
        held.append((found, expected))
        if grad:
            (mine,), (its,) = (torch.autograd.grad(out[0].sum(), x) for out in (found, expected))
            torch.testing.assert_close(mine, its)
    for found, expected in held:
        torch.testing.assert_close(found, expected)
        assert [one.device for one in found] == [one.device for one in expected]
    kinds = {name: found for name, found in regions().items() if name != "backward"}
    assert list(kinds.values()) == [["graph"]], str(pygraph.explain())


def test_a_scalar_that_the_call_updates(device: torch.device) -> None:
    """Results are those of its old contents or of its new ones, as the function says."""

    def fn(x: torch.Tensor, k: torch.Tensor) -> Any:
        before = k * 2
        k.add_(1)
        return x * k, before, k * 3

    fast = compiled(fn)
    mine, its = torch.tensor(1.0), torch.tensor(1.0)
    for _ in range(4):
        x = torch.randn(3, 4).to(device)
        torch.testing.assert_close(fast(x, mine), fn(x, its))
        torch.testing.assert_close(mine, its)


CHAINS: dict[str, Any] = {
    "NumPy's": (lambda x, k: x / (np.exp(k) * 2), lambda i: np.float64(i + 1)),
    "tensors": (lambda x, k: x / (k.exp() * 2 + 1), f64),
    "an element": (lambda x, k: x / k[1], lambda i: torch.arange(3.0) + i + 1),
    "a number": (lambda x, k: x / (k**1.5), lambda i: i + 1.5),
}


@pytest.mark.parametrize("kind", [kind for kind in CHAINS if kind != "a number" or not OLD_DYNAMO])
def test_arithmetic_on_the_host(fake: Fake, kind: str) -> None:
    """It is done by Python, at each call, and the rest of the call by C++."""
    fn, make = CHAINS[kind]
    fast = torch.compile(fn, backend=pygraph.backend, dynamic=True if kind == "a number" else None)
    for i in range(6):
        x = torch.randn(3, 4, device="emu")
        torch.testing.assert_close(fast(x, make(i)), fn(x, make(i)))
    assert regions() == {"inference": ["host graph"]}, str(pygraph.explain())
    assert len(fake.launches) == 4, "all calls but the first two"


def test_what_cpp_cannot_finish_is_begun_again_in_python(fake: Fake) -> None:
    fast = compiled(lambda x, k: x / (k.exp() * 2))
    x = torch.randn(4, device="emu")
    for i in range(6):
        fake.refuse = "launch" if i == 4 else None
        torch.testing.assert_close(fast(x, f64(i)), x / (f64(i).exp() * 2))
    assert len(fake.launches) == 3
