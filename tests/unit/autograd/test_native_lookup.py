"""Native lookup of the sites of calls under autograd: whatever has changed since, results are eager's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.process import extension


class Net(nn.Module):
    """Two layers that may share a weight, a mode, a scale that is closed over, and a number that decides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = 2.0

    def forward(self, x: Tensor, power: int = 1, *, shift: float = 0.0) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(x)) * self.scale)
        for _ in range(power):
            hidden = self.second(hidden)
        return hidden + shift


Change = Callable[[Net], object]


def replace(net: Net) -> None:
    net.first.weight = nn.Parameter(net.first.weight.detach() + 1)


def tie(net: Net) -> None:
    net.second.weight = net.first.weight


def untie(net: Net) -> None:
    net.second.weight = nn.Parameter(net.second.weight.detach().clone() * 2)


def move(net: Net) -> None:
    net.first.weight.data = net.first.weight.detach() * 3


def hook(net: Net) -> None:
    net.second.register_forward_hook(lambda module, args, result: result * 2)


def rescale(net: Net) -> None:
    net.scale += 1


CHANGES: dict[str, Change] = {
    "replaced": replace,
    "tied": tie,
    "untied": lambda net: (tie(net), untie(net)),
    "moved": move,
    "a hook": hook,
    "a number": rescale,
    "frozen": lambda net: net.second.weight.requires_grad_(not net.second.weight.requires_grad),
    "frozen in all": lambda net: net.requires_grad_(not net.first.weight.requires_grad),
    "in evaluation": lambda net: net.train(not net.training),
    "updated": lambda net: net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()}),
    "a layer": lambda net: setattr(net, "second", nn.Linear(3, 3, bias=False).to(net.first.weight.device)),
    "transposed": lambda net: setattr(net.first.weight, "data", net.first.weight.detach().t()),
}


def outcome(net: Net, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result and all gradients."""
    net.zero_grad()
    result = call(*args, **kwargs)
    if result.requires_grad:
        result.square().mean().backward()
    return result.detach(), [parameter.grad for parameter in net.parameters()], net.norm.running_mean.clone()


class Pair:
    """Two equal modules, in eager and transformed."""

    def __init__(self, device: torch.device) -> None:
        self.theirs, self.mine = Net().to(device), Net().to(device)
        self.fast = pygraph.jit(self.mine)
        self.device = device

    def check(self, calls: int, *args: Any, **kwargs: Any) -> None:
        """Compare some calls with eager."""
        for call in range(calls):
            x = torch.full((4, 3), 0.1 * call, device=self.device) + torch.arange(12.0, device=self.device).view(4, 3)
            expected = outcome(self.theirs, self.theirs, x, *args, **kwargs)
            torch.testing.assert_close(outcome(self.mine, self.fast, x, *args, **kwargs), expected)

    def change(self, change: Change) -> None:
        for net in (self.theirs, self.mine):
            torch.manual_seed(1)
            change(net)

    @property
    def found_natively(self) -> int:
        return sum(made.plan.hits for made in self.fast._pygraph_transformed.engine.cache.native._made)


native_or_not = pytest.mark.parametrize("native", [True, False], indirect=True, ids=["native", "python"])
native_only = pytest.mark.skipif(extension.start(wait=True) is None, reason=str(extension.reason()))


@native_only
def test_calls_are_found_natively(device: torch.device) -> None:
    pair = Pair(device)
    pair.check(6)
    assert pair.found_natively == 5
    assert pair.fast.cache_info().hits == 5  # each with its backward
    report = str(pair.fast.explain())
    assert "no fallbacks" in report


@pytest.mark.rotates
@native_or_not
@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_calls(device: torch.device, native: bool, name: str) -> None:
    pair = Pair(device)
    pair.check(3)
    for _ in range(2):
        pair.change(CHANGES[name])
        pair.check(3)


@native_or_not
def test_numbers(device: torch.device, native: bool) -> None:
    """Numbers may be live, or decide which operations run."""
    pair = Pair(device)
    for power in (1, 2, 2, 1, 3, 1):
        pair.check(2, power, shift=0.5 * power)


@native_or_not
def test_settings_around_calls(device: torch.device, native: bool) -> None:
    pair = Pair(device)
    pair.check(3)
    x = torch.ones(4, 3, device=device)
    with torch.no_grad():
        torch.testing.assert_close(pair.fast(x), pair.theirs(x))
    seen: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        expected, count = pair.theirs(x), len(seen)
        torch.testing.assert_close(pair.fast(x), expected)
        assert len(seen) > count > 0, "the function's own operations have saved"
    parameters = dict(pair.theirs.named_parameters())
    doubled = {name: (value * 2).detach().requires_grad_() for name, value in parameters.items()}
    torch.testing.assert_close(
        torch.func.functional_call(pair.mine, doubled, x), torch.func.functional_call(pair.theirs, doubled, x)
    )
    pair.change(lambda net: net.eval())
    pair.check(3)
    torch.testing.assert_close(torch.vmap(pair.fast)(x[:, None]), torch.vmap(pair.theirs)(x[:, None]))
    pull = torch.func.vjp(pair.fast, x)[1](x)
    torch.testing.assert_close(pull, torch.func.vjp(pair.theirs, x)[1](x))
    with torch.autograd.forward_ad.dual_level():
        moved = [torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x, x))).tangent
                 for f in (pair.fast, pair.theirs)]  # fmt: skip
    torch.testing.assert_close(*moved)
    pair.check(3)


@native_or_not
def test_arguments_that_require_grad(device: torch.device, native: bool) -> None:
    pair = Pair(device)
    for call in range(6):
        x = torch.ones(4, 3, device=device, requires_grad=call % 3 != 2)
        found: list[Any] = []
        for net, function in ((pair.theirs, pair.theirs), (pair.mine, pair.fast)):
            x.grad = None
            found.append((outcome(net, function, x), x.grad))
        torch.testing.assert_close(found[1], found[0])


def test_replaced_parameters_are_freed(device: torch.device) -> None:
    """Parameters are freed also where they are replaced before each call."""
    pair = Pair(device)
    pair.check(3)
    before: list[weakref.ref[Tensor]] = []
    for _ in range(12):
        before.append(weakref.ref(pair.mine.first.weight))
        pair.change(replace)
        pair.check(1)
    pair.check(2)
    gc.collect()
    assert [ref() for ref in before[:-1]] == [None] * 11


def test_a_cleared_cache_keeps_nothing(device: torch.device) -> None:
    pair = Pair(device)
    pair.check(4)
    weight = weakref.ref(pair.mine.first.weight)
    pair.fast.cache_clear()
    assert pair.found_natively == 0
    pair.check(4)
    pair.fast.cache_clear()
    pair.mine.first = nn.Linear(3, 3).to(device)
    pair.mine.second = nn.Linear(3, 3).to(device)
    gc.collect()
    assert weight() is None


@native_or_not
def test_the_least_recently_used_kind_of_call_makes_room(device: torch.device, native: bool) -> None:
    fast = pygraph.jit(lambda x: (torch.tanh(x) * x).sum(), max_graphs=2)
    one, two, three = (torch.ones(size, device=device, requires_grad=True) for size in (1, 2, 3))
    for x in (one, one, two, two, one, three):
        fast(x)
    before = fast.cache_info()
    assert before.captures == 3
    fast(one)
    assert fast.cache_info().misses == before.misses
    fast(two)
    assert fast.cache_info().misses > before.misses
