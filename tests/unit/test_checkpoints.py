"""Functions that set a random generator back, as checkpoints do: replays draw what eager draws, and draw it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import pygraph
from pygraph.errors import TraceError
from tests.steps import assert_same, no_synchronization, step_of


class Layers(nn.Module):
    """Layers with dropout, each in a checkpoint, and dropout around them."""

    def __init__(self, dropout: float = 0.3, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(dropout)) for _ in range(2)
        )  # fmt: skip
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x), 0.1, self.training)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, **self.options)
        return self.last(F.dropout(hidden, 0.1, self.training))


class InSegments(Layers):
    """The same by `checkpoint_sequential`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint_sequential(self.layers, 2, self.first(x), **self.options))


def momentum_step(net: nn.Module) -> Callable[..., Any]:
    return step_of(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))


def outside(net: nn.Module, transform: Callable[[Any], Any]) -> Callable[..., Any]:
    """A step whose forward alone is transformed; other numbers are drawn before its backward."""
    optimizer, forward = torch.optim.SGD(net.parameters(), 0.1), transform(net)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        torch.rand(3, device=x.device)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def train(device: torch.device, make: Callable[[], nn.Module], transform: Callable[[Any], Any], where: str) -> Any:
    """Losses, gradients, parameters, and what is drawn next."""
    torch.manual_seed(1)
    net = make().to(device)
    step = transform(momentum_step(net)) if where == "inside" else outside(net, transform)
    torch.manual_seed(2)
    found: list[Any] = []
    for _ in range(8):
        x, y = torch.randn(6, 4, device=device), torch.randint(0, 3, (6,), device=device)
        loss = step(x, y)
        found.append((loss, [p.grad for p in net.parameters()], torch.rand(2, device=device), torch.rand(2)))
    return found, net.state_dict()


def assert_in_graphs(fast: Any, device: torch.device) -> None:
    text = str(fast.explain())
    assert "no fallbacks" in text, text


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("kind", [Layers, InSegments])
def test_checkpoints_draw_the_same_numbers_again(
    device: torch.device, kind: type[Layers], reentrant: bool, where: str
) -> None:
    made: list[Any] = []

    def jit(fn: Any) -> Any:
        made.append(pygraph.jit(fn))
        return made[-1]

    def make() -> nn.Module:
        return kind(use_reentrant=reentrant)

    expected = train(device, make, lambda fn: fn, where)
    assert_same(train(device, make, jit, where), expected, device)
    if where == "inside" or not reentrant:
        assert made[0].cache_info().hits >= 6
        assert_in_graphs(made[0], device)


def test_replays_wait_for_nothing(device: torch.device) -> None:
    torch.manual_seed(1)
    fast = pygraph.jit(momentum_step(Layers(use_reentrant=False).to(device)))
    x, y = torch.randn(6, 4, device=device), torch.randint(0, 3, (6,), device=device)
    for _ in range(4):
        fast(x, y)
    with no_synchronization(device):
        fast(x, y)
    assert_in_graphs(fast, device)
    regions = fast.explain().to_dict()["regions"]
    assert {region["kind"] for region in regions} == {"graph", "host"}


def test_a_checkpoint_without_draws_is_one_graph(device: torch.device) -> None:
    """It sets the generator back all the same, which once was in the way of the draws after it."""
    torch.manual_seed(1)
    fast = pygraph.jit(momentum_step(Layers(0.0, use_reentrant=False).to(device)))
    x, y = torch.randn(6, 4, device=device), torch.randint(0, 3, (6,), device=device)
    for _ in range(4):
        fast(x, y)
    kinds = [region["kind"] for region in fast.explain().to_dict()["regions"]]
    assert kinds.count("graph") == 1


# ---- states of generators, written down ----------------------------------------------------------------------------


def of(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """Functions that read and set the state of a device's generator."""
    if device.type != "cuda":
        return torch.get_rng_state, torch.set_rng_state
    return torch.cuda.get_rng_state, torch.cuda.set_rng_state


def twice(x: Tensor) -> Any:
    get, put = of(x.device)
    before = get()
    first = torch.rand_like(x)
    after = get()
    put(before)
    again = torch.randn_like(x)  # another operation, from the same place
    put(after)
    return first, again, torch.rand_like(x)


def left_behind(x: Tensor) -> Any:
    """The next call draws what the second draw of this one was."""
    get, put = of(x.device)
    first = torch.rand_like(x)
    state = get()
    second = torch.rand_like(x)
    put(state)
    return first, second


def returned(x: Tensor) -> Any:
    first = torch.rand_like(x)
    return first, of(x.device)[0]()


def forked(x: Tensor) -> Any:
    devices = [x.device.index or 0] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        first = torch.rand_like(x)
    return first, torch.rand_like(x)


def a_part_of_it(x: Tensor) -> Any:
    """After setting back there are fewer draws than before, or more."""
    get, put = of(x.device)
    start = get()
    first, second = torch.rand_like(x), torch.rand_like(x)
    put(start)
    third = torch.rand_like(x)
    put(start)
    fourth, fifth, sixth = torch.rand_like(x), torch.rand_like(x), torch.rand_like(x)
    return first, second, third, fourth, fifth, sixth


@pytest.mark.parametrize("fn", [twice, left_behind, returned, forked, a_part_of_it], ids=lambda fn: fn.__name__)
def test_states_that_are_read_and_set(device: torch.device, fn: Callable[..., Any]) -> None:
    fast, x = pygraph.jit(fn), torch.ones(5, device=device)
    results: list[Any] = []
    for call in (fn, fast):
        torch.manual_seed(3)
        results.append([(call(x), torch.rand(2, device=device), torch.rand(2)) for _ in range(5)])
    assert_same(results[1], results[0], device)
    assert fast.cache_info().hits == 4
    assert_in_graphs(fast, device)


def test_a_state_that_comes_from_outside(device: torch.device) -> None:
    get, put = of(device)
    torch.manual_seed(4)
    state, x = get(), torch.ones(5, device=device)
    torch.rand(7, device=device)

    def fn(x: Tensor) -> Tensor:
        put(state)
        return torch.rand_like(x)

    fast = pygraph.jit(fn)
    expected = fn(x)
    assert_same([fast(x) for _ in range(4)], [expected] * 4, device)
    torch.manual_seed(5)
    state.copy_(get())
    assert_same(fast(x), fn(x), device)


def test_seeds_are_refused(device: torch.device) -> None:
    """Their numbers would have to be those of a generator that a replay does not have."""

    def fn(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return torch.rand_like(x)

    with pytest.raises(TraceError, match="it seeds or draws from"):
        pygraph.trace(fn)(torch.ones(2, device=device))


def test_a_trace_moves_no_generator(device: torch.device) -> None:
    x = torch.ones(5, device=device)
    before = torch.get_rng_state()
    pygraph.trace(twice)(x)
    assert torch.equal(torch.get_rng_state(), before)
