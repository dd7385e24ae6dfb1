"""Trials start from the state that the call finds: positions and caches stay in range however often a region runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.runtime.driver import Run

ROWS = 8
RUNS = 10  # as many as `CudaDriver.sample` runs in a row


class Repeating:
    """A timer that runs what it is given as often as the CUDA driver does, and says which way shall be the fastest."""

    def __init__(self, fastest: str = "patch") -> None:
        self.fastest = fastest
        self.asked = 0

    def __call__(self, run: Any) -> float:
        for _ in range(RUNS):
            run()
        self.asked += 1
        return 10.0 if run.way == self.fastest else 20.0


def row(device: torch.device, value: float, width: int = 4) -> torch.Tensor:
    return torch.full((1, width), float(value), device=device)


def zeros(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=device)


def start(device: torch.device, value: int = 0) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.int64, device=device)


# Each makes a function of one row with state of its own, and says where that state is.
State = tuple[Callable[[torch.Tensor], Any], list[torch.Tensor]]


def cursor(device: torch.device) -> State:
    buffer, position = zeros(device, ROWS, 4), start(device)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.index_copy_(0, position, x)
        position.add_(1)
        return buffer.sum(0)

    return write, [buffer, position]


def ring(device: torch.device) -> State:
    buffer, head = zeros(device, ROWS, 4), start(device)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer[head] = x
        head.copy_((head + 1) % ROWS)
        return buffer * 2

    return write, [buffer, head]


def twice(device: torch.device) -> State:
    buffer, position = zeros(device, 2 * ROWS, 4), start(device)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.index_copy_(0, position, x)
        position.add_(1)
        buffer.index_copy_(0, position, -x)
        position.add_(1)
        return buffer.sum(0)

    return write, [buffer, position]


def counter(device: torch.device) -> State:
    table, count = torch.arange(2.0 * ROWS, device=device), start(device)

    def write(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * table[count]

    return write, [count]


def several_regions(device: torch.device) -> State:
    buffer, position = zeros(device, ROWS, 4), start(device)

    def write(x: torch.Tensor) -> Any:
        buffer.index_copy_(0, position, x)
        few = x[x > 0]  # its size is known on the host only
        position.add_(1)
        return few.sum() + buffer.sum(0), position * 2

    return write, [buffer, position]


def out_of_place(device: torch.device) -> State:
    buffer, position, total = zeros(device, ROWS, 4), start(device), zeros(device, 4)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.index_copy_(0, position, x)
        torch.sum(buffer, 0, out=total)
        torch.add(position, 1, out=position)
        return total + 1

    return write, [buffer, position, total]


def scattered(device: torch.device) -> State:
    buffer, position = zeros(device, ROWS, 4), start(device)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.scatter_(0, position.expand(1, 4), x)
        position.add_(1)
        return buffer.gather(0, (position - 1).expand(1, 4)) + x

    return write, [buffer, position]


def drawn(device: torch.device) -> State:
    buffer, position = zeros(device, ROWS, 4), start(device)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.index_copy_(0, position, x + torch.rand_like(x))
        position.add_(1)
        return buffer.sum(0)

    return write, [buffer, position]


class Cache(nn.Module):
    """A cache of keys and values with its length as buffers, as those of language models."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, ROWS, 4))
        self.register_buffer("values", torch.zeros(1, ROWS, 4))
        self.register_buffer("length", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(1, self.length, x[None] + 1)
        self.values.index_copy_(1, self.length, x[None] - 1)
        self.length.add_(1)
        seen = torch.arange(ROWS, device=x.device) < self.length
        scores = (x @ self.keys[0].t()).masked_fill(~seen, float("-inf"))
        return scores.softmax(-1) @ self.values[0]


def module(device: torch.device) -> State:
    cache = Cache().to(device)
    return cache, list(cache.buffers())


STATES = [cursor, ring, twice, counter, several_regions, out_of_place, scattered, drawn, module]


def steps(fn: Any, state: list[torch.Tensor], device: torch.device, count: int = ROWS) -> list[list[torch.Tensor]]:
    """What each call returns and the state after it."""
    found: list[list[torch.Tensor]] = []
    for index in range(count):
        torch.manual_seed(index)
        with torch.no_grad():
            result = fn(row(device, index + 1))
        results = list(result) if isinstance(result, tuple) else [result]
        found.append([one.cpu() for one in (*results, *state)])
    return found


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("fastest", ["launch", "patch", "copy"])
@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_a_timer_may_run_as_often_as_it_likes(device: torch.device, make: Any, fastest: str) -> None:
    fn, state = make(device)
    expected = steps(fn, state, device)
    fn, state = make(device)
    timer = Repeating(fastest)
    fast = pygraph.select(pygraph.graphify(pygraph.indirect(fn)), timer=timer)
    torch.testing.assert_close(steps(fast, state, device), expected)
    assert timer.asked >= 3


@pytest.mark.pairwise
@pytest.mark.parametrize("wrap", [pygraph.jit, pygraph.graphify, pygraph.jit(reuse_outputs=True)])
@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_the_device_s_own_measurement(device: torch.device, native: bool, make: Any, wrap: Any) -> None:
    fn, state = make(device)
    expected = steps(fn, state, device)
    fn, state = make(device)
    torch.testing.assert_close(steps(wrap(fn), state, device), expected)


@pytest.mark.parametrize("wrap", [pygraph.jit, pygraph.graphify])
def test_the_last_row(device: torch.device, wrap: Any) -> None:
    """The first call is one after which no other is possible: nothing may run even once on what it leaves behind."""
    buffer, position = zeros(device, ROWS, 4), start(device, ROWS - 1)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.index_copy_(0, position, x)
        position.add_(1)
        return buffer.sum(0)

    fast = wrap(write)
    assert fast(row(device, 3)).tolist() == [3.0] * 4
    assert position.item() == ROWS
    position.zero_()
    assert fast(row(device, 2)).tolist() == [5.0] * 4


@pytest.mark.parametrize("fastest", ["launch", "patch", "copy"])
def test_state_that_is_passed(device: torch.device, fastest: str) -> None:
    def write(x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["buffer"].index_copy_(0, state["position"], x)
        state["position"].add_(1)
        return state["buffer"].sum(0)

    fast = pygraph.select(pygraph.graphify(pygraph.indirect(write)), timer=Repeating(fastest))
    state = {"buffer": zeros(device, ROWS, 4), "position": start(device)}
    total = 0.0
    for index in range(ROWS):
        if index % 3 == 2:  # somewhere else
            state = {name: tensor.clone() for name, tensor in state.items()}
        total += index
        assert fast(row(device, index), state).tolist() == [total] * 4
        assert state["position"].item() == index + 1


@pytest.mark.parametrize("value", [3, 0, 7])
def test_a_live_number_as_an_index(device: torch.device, value: int) -> None:
    """Recordings are made with numbers of their own, which no call passes."""
    table = torch.arange(8.0, device=device)

    def read(x: torch.Tensor, k: int) -> torch.Tensor:
        return x + table[start(x.device) + k]

    fast = pygraph.jit(read)
    for k in (value, 1, 2):
        assert fast(torch.ones(2, device=device), k).tolist() == [k + 1.0] * 2
    assert fast.cache_info().captures == 1


def test_a_timer_may_leave_out_what_is_put_back(device: torch.device) -> None:
    def timer(run: Any) -> float:
        assert isinstance(run, Run)
        assert run.restore is not None
        for _ in range(RUNS):
            run.prepare()
            run.timed()
        return 1.0

    fn, state = cursor(device)
    expected = steps(fn, state, device)
    fn, state = cursor(device)
    fast = pygraph.select(pygraph.graphify(fn), timer=timer)
    torch.testing.assert_close(steps(fast, state, device), expected)


def test_nothing_is_put_back_where_nothing_changes(device: torch.device) -> None:
    found: list[Any] = []

    def timer(run: Any) -> float:
        found.append(run.restore)
        return 1.0

    fast = pygraph.select(pygraph.graphify(pygraph.indirect(lambda x: x * 2)), timer=timer)
    fast(row(device, 1))
    assert found
    assert set(found) == {None}


def test_a_donated_cache(device: torch.device) -> None:
    @pygraph.jit(donate_argnums=0)
    def step(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        buffer = state["buffer"].index_copy(0, state["position"], x)
        return {"buffer": buffer, "position": state["position"] + 1}

    state = {"buffer": zeros(device, ROWS, 4), "position": start(device)}
    for index in range(ROWS):
        state = step(state, row(device, index + 1))
    assert state["buffer"][:, 0].tolist() == [1.0 + index for index in range(ROWS)]
    assert state["position"].item() == ROWS


# ---- past the end: an error on the emulated device, as in eager; on CUDA it would end the process's use of the device


@pytest.fixture
def emu() -> torch.device:
    from pygraph.runtime.emulated import driver as emulated

    return emulated.driver().device


@pytest.mark.parametrize("wrap", [pygraph.jit, pygraph.graphify])
def test_past_the_end(emu: torch.device, native: bool, wrap: Any) -> None:
    states: list[list[torch.Tensor]] = []
    for transform in (lambda fn: fn, wrap):
        fn, state = cursor(emu)
        fn = transform(fn)
        for index in range(ROWS):
            fn(row(emu, index))
        for _ in range(2):
            with pytest.raises(IndexError, match="out of bounds"):
                fn(row(emu, 9))
        state[1].fill_(2)
        fn(row(emu, 5))
        states.append(state)
    torch.testing.assert_close(states[1], states[0])


@pytest.mark.parametrize("wrap", [pygraph.jit, pygraph.graphify])
def test_a_first_call_past_the_end(emu: torch.device, wrap: Any) -> None:
    fn, (buffer, position) = cursor(emu)
    fast = wrap(fn)
    position.fill_(ROWS)
    with pytest.raises(IndexError, match="out of bounds"):
        fast(row(emu, 1))
    assert position.item() == ROWS
    assert buffer.sum().item() == 0
    position.zero_()
    assert fast(row(emu, 1)).tolist() == [1.0] * 4
    assert position.item() == 1
