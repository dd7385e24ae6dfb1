"""Operations on the state of a random generator: reading it, and setting it back, as a checkpoint does.

============================  ==================================================================
``pygraph::random_state``      the state of a device's default generator, as bytes on the host
``pygraph::set_random_state``  sets the generator to a state
============================  ==================================================================

Both run on the host, between graphs: no graph can be told to draw its numbers again. Neither waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload  # checked with torch 2.11 and 2.13

from pygraph.ir.effects import KNOWN_NAMESPACES, is_operation, is_random
from pygraph.ir.ops import define


def _random_state(device: torch.device, size: int) -> torch.Tensor:
    del size
    return torch.get_rng_state() if device.type == "cpu" else _functions(device).get_rng_state(device)


def _random_state_fake(device: torch.device, size: int) -> torch.Tensor:
    del device
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _functions(device).set_rng_state(state, device)


def _set_random_state_fake(state: torch.Tensor, device: torch.device) -> None:
    return None


def _functions(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _register() -> None:
    # Random draws stay in order, and so does reading the state between them.
    schema, draws = "random_state(Device device, int size) -> Tensor", torch.Tag.nondeterministic_seeded
    define(schema, _random_state, _random_state_fake, tags=(draws,))
    define("set_random_state(Tensor state, Device device) -> ()", _set_random_state, _set_random_state_fake)
    for operation in (random_state(), set_random_state()):
        fx.has_side_effect(operation)


def random_state() -> Callable[..., torch.Tensor]:
    """The operation that reads a state."""
    return torch.ops.pygraph.random_state.default


def set_random_state() -> Callable[..., None]:
    """The operation that sets a state."""
    return torch.ops.pygraph.set_random_state.default


_register()


def drop_idle_states(graph: fx.Graph) -> None:
    """Delete readings of states that nobody uses, and settings without which all draws are the same.

    A checkpoint sets the state back even if nothing is drawn inside. Any draw is taken to move all generators.

    Args:
        graph: A graph of operations in the order of their effects, which is changed.
    """
    while idle := _idle(graph):
        for node in idle:
            graph.erase_node(node)


def states_of(graph: fx.Graph, device_type: str) -> list[fx.Node]:
    """The nodes that read or set the state of a generator of such a device."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.target in (random_state(), set_random_state()):
            device: Any = node.args[0] if node.target is random_state() else node.args[1]
            found += [node] if device.type == device_type else []
    return found


_State: TypeAlias = "tuple[torch.device, int]"
"""A state of a generator: its device, and a number that is another one after each draw."""


def _idle(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that can be deleted, each for itself and all together."""
    idle: list[fx.Node] = []
    numbers = itertools.count(1)
    drawn = 0  # the number of the state after the last draw
    now: dict[torch.device, int] = {}  # those of generators that were set since then
    read: dict[Any, _State] = {}
    settings: dict[torch.device, fx.Node] = {}  # the last ones, on which nothing has depended yet
    for node in graph.nodes:
        if node.target is random_state():
            device: Any = node.args[0]
            read[node] = device, now.get(device, drawn)
            if not node.users:
                idle.append(node)
            else:
                settings.pop(device, None)
        elif node.target is set_random_state():
            state, device = node.args
            wanted, before = read.get(state), now.get(device, drawn)
            if wanted == (device, before):
                idle.append(node)
                continue
            if device in settings:
                idle.append(settings[device])
            settings[device] = node
            now[device] = wanted[1] if wanted is not None and wanted[0] == device else next(numbers)
        elif _may_draw(node):
            drawn = next(numbers)
            now.clear()
            settings.clear()
    return idle


def _may_draw(node: fx.Node) -> bool:
    """Whether a node may draw random numbers, as control flow in its branches and custom operations may."""
    if node.op != "call_function" or not isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return False
    return is_random(node) or not is_operation(node) or node.target.namespace not in KNOWN_NAMESPACES  # pyright: ignore
