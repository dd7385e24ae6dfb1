"""Histories of functions that write where a position says, at a capacity of two: whatever runs once too often is seen.

Positions and what is written with them are captured tensors, buffers of a module or arguments; beside each there is
eager PyTorch. Nothing is compared after a call that is past the end, which on CUDA is not made.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn
from torch.utils import _pytree as pytree

import pygraph
from tests import extent

CAPACITY = 2
WIDTH = 3
RUNS = 7  # more than any buffer here has room for


def favouring(way: str) -> Callable[[Any], float]:
    """A timer that runs what it is given several times; of launches, patched pointers and copies one is the fastest."""

    def timer(run: Any) -> float:
        for _ in range(RUNS):
            run()
        return 10.0 if run.way == way else 30.0

    return timer


WRAPS: dict[str, Callable[[Any], Any]] = {
    "jit": pygraph.jit,
    "small cache": pygraph.jit(max_graphs=1),
    "graphify": pygraph.graphify,
    "indirect": lambda fn: pygraph.graphify(pygraph.indirect(fn)),
    "launch": lambda fn: pygraph.select(pygraph.graphify(pygraph.indirect(fn)), timer=favouring("launch")),
    "patch": lambda fn: pygraph.select(pygraph.graphify(pygraph.indirect(fn)), timer=favouring("patch")),
    "copy": lambda fn: pygraph.select(pygraph.graphify(pygraph.indirect(fn)), timer=favouring("copy")),
    "reuse": lambda fn: pygraph.jit(fn, reuse_outputs=True),
}


class World(nn.Module):
    """One function with its state; there are two, one transformed and one not."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(CAPACITY, WIDTH, device=device))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64, device=device))
        self.weight = nn.Parameter(torch.eye(WIDTH, device=device))

    def state(self) -> dict[str, torch.Tensor]:
        return {"memory": self.memory, "position": self.position}

    def reset(self, position: int, value: float) -> None:
        with torch.no_grad():
            self.memory.fill_(value)
            self.position.fill_(position)


def cursor(memory: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> Any:
    memory.index_copy_(0, position, x)
    position.add_(1)
    return memory.sum(0) + x, position * 2


def ring(memory: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> Any:
    memory[position] = x
    position.copy_((position + 1) % CAPACITY)
    return memory * 2


def twice(memory: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> Any:
    memory.index_add_(0, position, x)
    position.add_(1)
    memory.scatter_(0, position.view(1, 1).expand(1, WIDTH), -x)
    position.sub_(1)
    position.add_(1)
    return memory.clone()


def cache(memory: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> Any:
    memory.index_copy_(0, position, x * 0.5)
    seen = torch.arange(CAPACITY, device=x.device) <= position
    position.add_(1)
    return (x @ memory.t()).masked_fill(~seen, float("-inf")).softmax(-1) @ memory


def regions(memory: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> Any:
    memory.index_copy_(0, position, x)
    few = x[x > 0]
    position.add_(1)
    return few.sum() + memory.index_select(0, position - 1)


def drawn(memory: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> Any:
    memory.index_copy_(0, position, x + torch.rand_like(x))
    position.add_(1)
    return memory + torch.rand_like(memory)


KINDS = {fn.__name__: fn for fn in (cursor, ring, twice, cache, regions, drawn)}
ROOM = {"twice": 1}
"""How many calls fit, where that is not the capacity."""


def closed_over(fn: Any, world: World) -> Any:
    memory, position = world.memory, world.position
    return lambda x: fn(memory, position, x)


def attributes(fn: Any, world: World) -> Any:
    return lambda x: fn(world.memory, world.position, x) if x.dim() else x


def arguments(fn: Any, world: World) -> Any:
    return lambda x, state: fn(state["memory"], state["position"], x)


def weighted(fn: Any, world: World) -> Any:
    return lambda x: fn(world.memory, world.position, (x @ world.weight).detach())


REACHED = {fn.__name__: fn for fn in (closed_over, attributes, arguments, weighted)}


class Cursors(RuleBasedStateMachine):
    """Every rule does the same to both worlds; results, held results and states are compared."""

    device: torch.device

    @initialize(kind=st.sampled_from(list(KINDS)), wrap=st.sampled_from(list(WRAPS)), by=st.sampled_from(list(REACHED)))
    def start(self, kind: str, wrap: str, by: str) -> None:
        self.kind, self.by, self.reuses = kind, by, wrap == "reuse"
        self.worlds = World(self.device), World(self.device)
        functions = [REACHED[by](KINDS[kind], world) for world in self.worlds]
        self.transformed = WRAPS[wrap](functions[0])
        self.functions = self.transformed, functions[1]
        self.held: list[tuple[Any, Any]] = []
        self.counter = 0

    def fits(self) -> bool:
        return self.kind == "ring" or int(self.worlds[1].position) < ROOM.get(self.kind, CAPACITY)

    # -- calls ----------------------------------------------------------------------------------------------------

    def call(self, grad: bool = False) -> None:
        self.counter += 1
        results: list[Any] = []
        for fn, world in zip(self.functions, self.worlds, strict=True):
            x = torch.full((1, WIDTH), float(self.counter), device=self.device)
            given = (x, world.state()) if self.by == "arguments" else (x,)
            torch.manual_seed(self.counter)
            with torch.set_grad_enabled(grad):
                results.append(fn(*given))
        same(*results)
        if not self.reuses:
            self.held.append((results[0], results[1]))
            del self.held[:-4]

    @precondition(lambda self: self.fits())
    @rule()
    def advance(self) -> None:
        self.call()

    @precondition(lambda self: self.fits())
    @rule()
    def advance_with_gradients_on(self) -> None:
        self.call(grad=True)

    @precondition(lambda self: not self.fits() and self.device.type == "emu")
    @rule()
    def go_past_the_end(self) -> None:
        for fn, world in zip(self.functions, self.worlds, strict=True):
            x = torch.full((1, WIDTH), 1.0, device=self.device)
            with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
                fn(*((x, world.state()) if self.by == "arguments" else (x,)))
        self.put(0, 0)

    # -- what lies there ------------------------------------------------------------------------------------------

    @rule(position=st.integers(0, CAPACITY - 1), value=st.integers(-2, 2))
    def put(self, position: int, value: int) -> None:
        for world in self.worlds:
            world.reset(position, value)

    @rule(row=st.integers(0, CAPACITY - 1))
    def write_from_outside(self, row: int) -> None:
        for world in self.worlds:
            world.memory[row] += 1

    @precondition(lambda self: self.by != "closed_over")
    @rule()
    def replace_the_buffers(self) -> None:
        for world in self.worlds:
            world.memory, world.position = world.memory.clone(), world.position.clone()

    @precondition(lambda self: self.by != "closed_over")
    @rule()
    def load_another_state(self) -> None:
        for world in self.worlds:
            world.load_state_dict({name: torch.zeros_like(value) for name, value in world.state_dict().items()})

    @rule()
    def clear_the_cache(self) -> None:
        self.transformed.cache_clear()

    @rule()
    def forget_results(self) -> None:
        self.held.clear()

    # -- what holds at every step ---------------------------------------------------------------------------------

    @invariant()
    def states_and_held_results_are_the_same(self) -> None:
        if hasattr(self, "worlds"):
            same(*(world.state() for world in self.worlds))
            for mine, eager in self.held:
                same(mine, eager)

    def teardown(self) -> None:
        if hasattr(self, "transformed"):
            self.transformed.cache_clear()
        gc.collect(0)


def same(mine: Any, eager: Any) -> None:
    for got, expected in zip(pytree.tree_leaves(mine), pytree.tree_leaves(eager), strict=True):
        torch.testing.assert_close(got, expected)


def test_positions_at_capacity_two(device: torch.device) -> None:
    machine = type("Cursors", (Cursors,), {"device": device})
    chosen = settings(
        max_examples=extent.examples(20, 300), stateful_step_count=15, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)


class Donated(RuleBasedStateMachine):
    """A state that every call consumes and returns anew."""

    device: torch.device

    @initialize(by_arguments=st.booleans())
    def start(self, by_arguments: bool) -> None:
        def step(state: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
            memory = state["memory"].index_copy(0, state["position"], x)
            return {"memory": memory, "position": state["position"] + 1}

        self.eager = step
        options = {"donate_argnums": 0} if by_arguments else {"donate_argnames": "state"}
        self.mine = pygraph.jit(step, **options)
        self.by_name = not by_arguments
        self.restart(0)

    @rule(position=st.integers(0, CAPACITY - 1))
    def restart(self, position: int) -> None:
        self.counter = 0
        self.states = [
            {
                "memory": torch.zeros(CAPACITY, WIDTH, device=self.device),
                "position": torch.full((1,), position, dtype=torch.int64, device=self.device),
            }
            for _ in range(2)
        ]

    @precondition(lambda self: int(self.states[1]["position"]) < CAPACITY)
    @rule()
    def advance(self) -> None:
        self.counter += 1
        x = torch.full((1, WIDTH), float(self.counter), device=self.device)
        if self.by_name:
            self.states[0] = self.mine(state=self.states[0], x=x)
        else:
            self.states[0] = self.mine(self.states[0], x)
        self.states[1] = self.eager(self.states[1], x)

    @invariant()
    def states_are_the_same(self) -> None:
        if hasattr(self, "states"):
            same(*self.states)

    def teardown(self) -> None:
        if hasattr(self, "mine"):
            self.mine.cache_clear()


def test_donated_positions_at_capacity_two(device: torch.device) -> None:
    machine = type("Donated", (Donated,), {"device": device})
    chosen = settings(max_examples=extent.examples(8, 60), stateful_step_count=10, deadline=None)
    run_state_machine_as_test(machine, settings=chosen)
