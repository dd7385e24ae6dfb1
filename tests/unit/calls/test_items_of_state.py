"""Lists and deques in attributes whose items a function changes: calls take the items and leave others behind."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pygraph
from pygraph.guards.locations import Items, items_of
from tests.steps import assert_same

CALLS = 12


class Holder:
    """An object with a list or a deque, and a function that changes it."""

    def __init__(self, items: Any, step: Callable[[Any, Tensor], Tensor]) -> None:
        self.items, self.step = items, step

    def __call__(self, x: Tensor) -> Tensor:
        """Call the function on the list itself."""
        return self.step(self.items, x)


def recurrent(states: list[Tensor], x: Tensor) -> Tensor:
    for index in range(len(states)):
        states[index] = x = torch.tanh(states[index] + x)
    return x


def lazy(states: list[Any], x: Tensor) -> Tensor:
    states[1] = x * 2 if states[1] is None else states[1] * 0.5 + x
    return states[1]


def pairs(states: list[Any], x: Tensor) -> Tensor:
    key, value = states[0] or (x * 0, x * 0)
    states[0] = (key * 0.5 + x, value + key)
    return states[0][1]


def counters(states: list[Any], x: Tensor) -> Tensor:
    states[0] += 1
    states[1] *= 0.9
    return x * states[0] + states[1]


def balance(states: list[Any], x: Tensor) -> Tensor:
    """The weight of a loss, by what the loss was."""
    loss = x.sigmoid().mean() * states[0]
    states[0] = states[0] * 0.99 + 0.01 / loss.detach().item()
    return loss


def window(states: list[Tensor], x: Tensor) -> Tensor:
    states.pop(0)
    states.append(x * 2)
    return torch.stack(states).mean(0)


def filling(states: list[Tensor], x: Tensor) -> Tensor:
    """A window that is empty at first, and is read."""
    states.append(x)
    if len(states) > 3:
        del states[0]
    return sum(states) / len(states)  # pyright: ignore[reportReturnType]


def cache(states: list[Tensor], x: Tensor) -> Tensor:
    """One of layers, which is filled by the first call, and has the last four."""
    for layer in range(2):
        if len(states) <= layer:
            states.append(x)
        else:
            states[layer] = torch.cat((states[layer], x))[-8:]
        x = x + states[layer].mean()
    return x


def refilled(states: list[Tensor], x: Tensor) -> Tensor:
    states.clear()
    states.extend((x * 2, x * 3))
    return states[0] + states[1]


def in_place(states: list[Tensor], x: Tensor) -> Tensor:
    states[0].add_(x)
    states[1] = states[0] * 2
    return states[1]


def rotated(states: collections.deque[float], x: Tensor) -> Tensor:
    states.rotate(1)
    return x * states[0]


def frames(states: collections.deque[Tensor], x: Tensor) -> Tensor:
    states.append(x)
    return torch.stack(list(states)).amax(0)


ZEROS: Callable[[torch.device], list[Any]] = lambda device: [torch.zeros(4, device=device) for _ in range(3)]  # noqa: E731
CASES: dict[str, tuple[Callable[[torch.device], Any], Callable[[Any, Tensor], Tensor]]] = {
    "recurrent": (ZEROS, recurrent),
    "lazy": (lambda device: [None, None], lazy),
    "pairs": (lambda device: [None], pairs),
    "counters": (lambda device: [0, 1.0], counters),
    "balance": (lambda device: [4.0], balance),
    "window": (ZEROS, window),
    "filling": (lambda device: [], filling),
    "cache": (lambda device: [], cache),
    "refilled": (lambda device: [], refilled),
    "in_place": (ZEROS, in_place),
    "rotated": (lambda device: collections.deque([1.0, 2.0, 3.0]), rotated),
    "frames": (lambda device: collections.deque(ZEROS(device), maxlen=3), frames),
    "filling_frames": (lambda device: collections.deque(maxlen=3), frames),
}


def both(device: torch.device, name: str) -> tuple[Holder, Holder, Any]:
    """The object in eager, its copy, and what calls the copy."""
    make, step = CASES[name]
    expected = Holder(make(device), step)
    got = copy.deepcopy(expected)
    return expected, got, pygraph.jit(got)


def check(device: torch.device, expected: Holder, got: Holder, fast: Any, numbers: range) -> None:
    for number in numbers:
        x = torch.linspace(-1, number, 4, device=device)
        assert_same(fast(x), expected(x), device)
        assert_same(list(got.items), list(expected.items), device)


@pytest.mark.parametrize("name", CASES)
def test_items_are_left_behind(device: torch.device, name: str) -> None:
    """The list stays the same object, and there is a graph."""
    expected, got, fast = both(device, name)
    items = got.items
    check(device, expected, got, fast, range(CALLS))
    assert got.items is items
    info = fast.cache_info()
    assert info.hits >= CALLS - 5, fast.explain()
    assert info.captures > 0, fast.explain()


@pytest.mark.parametrize("name", ["recurrent", "counters", "window", "filling", "cache", "frames"])
@pytest.mark.parametrize("change", ["replaced", "an item", "shorter", "emptied"])
def test_changes_between_calls(device: torch.device, name: str, change: str) -> None:
    expected, got, fast = both(device, name)
    check(device, expected, got, fast, range(6))
    for one in (expected, got):
        if change == "replaced":
            one.items = copy.copy(one.items)
        elif change == "an item":
            one.items[0] = one.items[0] * 2
        elif change == "shorter" and name != "counters":
            one.items.pop()
        elif change == "emptied" and name in ("filling", "cache", "frames"):
            one.items.clear()
    check(device, expected, got, fast, range(6, 12))


def test_who_else_has_the_list_sees_its_items(device: torch.device) -> None:
    expected, got, fast = both(device, "window")
    seen = got.items
    first = seen[0]
    check(device, expected, got, fast, range(CALLS))
    assert len(seen) == 3
    assert seen[0] is not first
    kept = [*seen]
    copies = [one.clone() for one in kept]
    check(device, expected, got, fast, range(CALLS, CALLS + 4))
    assert_same(kept, copies, device)  # no later call has overwritten them


def test_a_window_that_is_being_filled(device: torch.device) -> None:
    """It has a graph when it is full, and not one for each number of items."""
    frames: collections.deque[Tensor] = collections.deque(maxlen=10)

    def step(x: Tensor) -> Tensor:
        frames.append(x * 2)
        return torch.stack(list(frames)).mean(0)

    fast = pygraph.jit(step, strict=True)
    seen: list[Tensor] = []
    for number in range(20):
        x = torch.full((3,), float(number), device=device)
        seen.append(x * 2)
        torch.testing.assert_close(fast(x), torch.stack(seen[-10:]).mean(0))
    info = fast.cache_info()
    assert info.captures <= 3, fast.explain()
    assert info.hits >= 8, fast.explain()


def test_differentiated_from_outside(device: torch.device) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.states = [torch.zeros(4)]

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.layer(x) + self.states[0].to(x.device))
            self.states[0] = y.detach()
            return y.sum()

    torch.manual_seed(0)
    net = Net().to(device)
    found: list[Any] = []
    for jitted in (False, True):
        other = copy.deepcopy(net)
        call = pygraph.jit(other) if jitted else other
        for number in range(6):
            call(torch.full((4,), float(number), device=device)).backward()
        found.append([other.layer.weight.grad, other.states])
    assert_same(found[1], found[0], device)


def test_a_call_that_fails_leaves_the_items_alone(device: torch.device) -> None:
    def step(states: list[Any], x: Tensor) -> Tensor:
        states[0] = x * 2
        if x.shape[0] == 3:
            raise ValueError("three")
        return states[0] + 1

    holder = Holder([torch.zeros(4, device=device)], step)
    fast = pygraph.jit(holder)
    for _ in range(3):
        fast(torch.ones(4, device=device))
    with pytest.raises(ValueError, match="three"):
        fast(torch.ones(3, device=device))
    assert holder.items[0].tolist() == [2, 2, 2]  # as in eager, which has stored it before


def test_what_is_no_location_of_items() -> None:
    """Lists and objects among the items would be others after a call; and many items are many inputs."""

    class Own(list[Any]):
        """A list that may do something of its own."""

    plain = [torch.ones(1), 1, "a", None, (torch.ones(1), 2)]
    assert isinstance(items_of("x", plain, []), Items)
    assert isinstance(items_of("x", collections.deque(plain), [1]), Items)
    for items in ([[]], [{}], [(1, [])], [Holder(1, window)], list(range(100))):
        assert items_of("x", items, []) is None
        assert items_of("x", [], items) is None
    assert items_of("x", Own(), []) is None
