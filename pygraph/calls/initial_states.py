"""The states of random generators when a call began, to which they are put back where it begins anew."""

# Functions here are of any type, and so is what they are called with; engines are made from this module.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.calls.entries import Differentiated, Entry, Refused, Stateful
from pygraph.guards.environment import Environment
from pygraph.ir.descriptors import CapturedGenerator
from pygraph.ir.effects import may_draw
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import RandomStates
from pygraph.tracing.iterator_locations import generators_of
from pygraph.tracing.real_values import outside_of_modes


@dataclasses.dataclass(frozen=True)
class Draws:
    """The random generators that the calls of an engine draw from, as far as it has compiled them.

    Attributes:
        any: Whether they may draw random numbers.
        generators: Those that they are passed or have found, besides those of devices; None if Python may draw from
            others.
    """

    any: bool = False
    generators: tuple[torch.Generator, ...] | None = ()

    @classmethod
    def of(cls, engine: Any) -> Draws:
        """Find those that calls of an engine draw from, or of the engines that run its calls."""
        entries = [entry for entry in _serving(engine) if not isinstance(entry, Refused)]  # which replay nothing
        if not any(map(_draws, entries)):
            return cls()
        if any(map(_is_python, entries)):
            return cls(any=True, generators=None)
        inputs = (one for entry in entries if entry.program is not None for one in entry.program.inputs)
        found = {id(one.value): one.value for one in inputs if isinstance(one, CapturedGenerator)}
        return cls(any=True, generators=tuple(found.values()))


class KnownDraws:
    """The draws of the calls of a function, looked up again once something has been compiled.

    Args:
        users: The engine of the function.
        look_up: Looks it up.
        first: What holds for the first call; None to look it up as well.
    """

    def __init__(self, users: Any, look_up: Callable[[], Draws], first: Draws | None = None) -> None:
        self._users, self._look_up, self._first = users, look_up, first
        self._looked_at, self._draws = -1, Draws()  # the number of compilations at that time

    def now(self) -> Draws:
        """The draws of calls now."""
        compilations = self._users.shared.counts.compilations
        if compilations != self._looked_at:
            self._looked_at, first, self._first = compilations, self._first, None
            self._draws = self._look_up() if first is None else first
        return self._draws


class InitialStates:
    """The states of random generators when a call began.

    Args:
        users: The engine of the function; None if no call is under way.
        args: The arguments of the call.
        kwargs: Its keyword arguments.
        draws: What its replays draw from.
    """

    def __init__(
        self, users: Any = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None,
        draws: Draws = Draws(),
    ) -> None:  # fmt: skip
        self._users, self._call, self._draws = users, (args, kwargs or {}), draws
        # Those that were read first are put back last: a replay may have drawn from some before all were read.
        self._states: list[RandomStates] = []
        self._has_all = users is None

    def save(self) -> None:
        """Read those that replays draw from, if that has not been done yet: nothing has been drawn until now."""
        if self._states or self._users is None:
            return
        if self._draws.generators is None:
            self.save_all()
        else:
            self._states.append(_states(self._users, self._call, self._draws.generators))

    def save_in_trace(self) -> None:
        """Read all that the function can reach, while it is traced."""
        if not self._has_all:
            outside_of_modes(self.save_all)

    def save_all(self) -> None:
        """Read all that the function can reach, if that has not been done yet: what is compiled may draw from any."""
        if self._has_all:
            return
        self._has_all = True
        args, kwargs = self._call
        found = generators_of(Environment(self._users.fn, {"args": args, "kwargs": kwargs}))
        self._states.insert(0, _states(self._users, self._call, found))

    def now(self) -> RandomStates | None:
        """The states of the same generators as they are now; None if nothing has been drawn."""
        return self._states[0].now() if self._states else None

    def restore(self) -> None:
        """Put the generators back; without states, nothing has been drawn."""
        for states in self._states:
            states.restore()


def entries_of(engine: Any) -> Iterator[tuple[Any, Entry]]:
    """The entries of an engine, and of those that run its calls, each with its engine."""
    for entry in list(engine.cache.entries):
        yield engine, entry
        if isinstance(entry, Stateful):
            for inner in entry.runner.engines():
                yield from entries_of(inner)


def _serving(engine: Any) -> Iterator[Entry]:
    """The entries of an engine and of those that run its calls, and those of the parts of differentiated calls.

    Such a call without parts has drawn nothing: the function, as it is, is for traces, and has the user's be run.
    """
    for owner, entry in entries_of(engine):
        if not isinstance(entry, Differentiated):
            yield entry
            continue
        for function in owner.composition.functions():
            yield from _serving(function)


def _is_python(entry: Entry) -> bool:
    """Whether calls of an entry run as Python, wholly or in part; those of others' engines have entries themselves."""
    return entry.runner.in_python() is not None if isinstance(entry, Stateful) else entry.program is None


def _draws(entry: Entry) -> bool:
    """Whether calls of an entry may draw random numbers."""
    if _is_python(entry):
        return True
    return entry.program is not None and any(map(may_draw, entry.program.nodes))


def _states(
    users: Any, call: tuple[tuple[Any, ...], dict[str, Any]], generators: Iterable[torch.Generator]
) -> RandomStates:
    """The present states of generators, of the host's, and of those of the devices that a call may use."""
    devices = {leaf.device for leaf in _leaves(call) if isinstance(leaf, torch.Tensor)}
    devices.update(users.shared.pools)
    if torch.cuda.is_initialized():  # before the first replay, it is not known where captured tensors are
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return RandomStates([driver for driver in map(driver_for, devices) if driver is not None], generators)


def _leaves(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Sequence[Any]:
    """The leaves of positional and keyword arguments; every call asks for them, and most have no structure."""
    args, kwargs = arguments
    flat = (*args, *kwargs.values())
    return flat if all(type(one) in _PLAIN for one in flat) else pytree.tree_leaves(arguments)


_PLAIN = (torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None))
