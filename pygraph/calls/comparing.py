"""Whether calls in which Python has a part are faster by their graphs or as they are: the calls themselves tell.

Between graphs of one call, Python asks, decides and runs statements. What that costs is in no measurement of graphs,
and may be more than they gain: where a call goes another way each time, or its graphs are of a few kernels. Once
nothing is compiled any more, some calls run by graphs and some as they are, and the others run as the faster ones.
"""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.calls import limits, retries, surroundings
from pygraph.calls.engine import Engine
from pygraph.ir.descriptors import Fallback
from pygraph.runtime.devices import driver_for
from pygraph.runtime.driver import Driver

FASTER = Fallback("the call", "it was faster as it is than by its graphs and the Python around them")
"""Why calls run as they are that are faster so."""

MEASURES = True
"""Whether anything is compared; tests do not, as what they see would depend on time."""

_BLOCK = 4
"""Calls of one kind in a row, of which the first does not count."""
_BLOCKS = 4
CLEARLY = 0.9
"""The share of the time of graphs which the function as it is has to stay below to be the faster way."""
MUCH = 0.5
"""A smaller share, where a backward may come later, which is not timed, or where little is known of the calls."""


def compares(function: Engine) -> bool:
    """Whether calls of a function may be compared with the function as it is."""
    options, passes = function.function.options, function.function.passes
    policy = options.selection
    is_measured = any(one.is_measured for one in passes) and policy.measures and not options.strict
    return MEASURES and is_measured and policy.timer is None  # which is for graphs alone


def drivers_of(function: Engine, arguments: Any = ()) -> list[Driver]:
    """The drivers of the devices that calls of a function compute on.

    Args:
        function: Its engine.
        arguments: Arguments of a call, which tell the devices where there are no graphs.
    """
    devices = set(function.shared.pools)
    devices = devices or {one.device for one in pytree.tree_leaves(arguments) if isinstance(one, torch.Tensor)}
    return [driver for driver in map(driver_for, devices) if driver is not None]


def requires_grad(result: Any) -> bool:
    """Whether a result may be differentiated."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(result))


class Blocks:
    """Calls by graphs and as they are, in turns, and what they take.

    Args:
        function: The engine of the function.
        blocks: The number of turns.
        clearly: The share of the time of graphs which the function as it is has to stay below to be the faster way.
        graphs: What a call by graphs takes, if that is known: then all turns are calls as they are.

    Attributes:
        is_of_one_way: Whether it is known.
    """

    def __init__(self, function: Engine, blocks: int = _BLOCKS, clearly: float = CLEARLY, graphs: float = 0.0) -> None:
        self._function, self._count, self._clearly, self._graphs = function, blocks * _BLOCK, clearly, graphs
        self.is_of_one_way = graphs > 0.0
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._measured = 0

    @property
    def has_begun(self) -> bool:
        """Whether there has been a call."""
        return self._measured > 0

    @property
    def is_done(self) -> bool:
        """Whether all turns have been taken."""
        return self._measured >= self._count

    @property
    def is_by_graphs(self) -> bool:
        """Whether the next call is one by graphs."""
        return self._measured // _BLOCK % 2 == 0 and not self.is_of_one_way

    def run(self, by_graphs: Callable[..., Any], drivers: Sequence[Driver], args: Any, kwargs: Any) -> Any:
        """The result of the next call.

        Args:
            by_graphs: Runs a call by graphs.
            drivers: The drivers of the devices.
            args: The positional arguments of the call.
            kwargs: Its keyword arguments.
        """
        is_graphs, number = self.is_by_graphs, self._measured
        self._measured += 1
        for driver in drivers:
            driver.synchronize()
        begin = retries.clock()
        result = by_graphs(*args, **kwargs) if is_graphs else self._function.fn(*args, **kwargs)
        for driver in drivers:
            driver.synchronize()
        if requires_grad(result):
            self._clearly = min(self._clearly, MUCH)
        if number % _BLOCK:
            self._seconds[is_graphs].append(retries.clock() - begin)
        return result

    def is_faster_as_it_is(self) -> bool:
        """Whether the function as it is has been clearly faster; not if calls have raised errors."""
        as_it_is, graphs = self._seconds
        graphs = [self._graphs] if self.is_of_one_way else graphs
        return bool(as_it_is and graphs) and statistics.median(as_it_is) < self._clearly * statistics.median(graphs)


class Comparison:
    """Runs calls by graphs or as they are, whichever is faster.

    Args:
        function: The engine of the function.
    """

    def __init__(self, function: Engine) -> None:
        self._function = function
        self._is_on = compares(function)
        self._is_faster_as_it_is = False
        self._traces = -1
        self._left = limits.LIMITS.calls_before_comparing
        self._blocks = Blocks(function)

    def run(self, by_graphs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call.

        Args:
            by_graphs: Runs a call by graphs.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if not (self._is_on and MEASURES):
            return by_graphs(args, kwargs)
        if not self._is_faster_as_it_is and self._traces != self._function.shared.counts.traces:
            # Calls as they are may leave tensors elsewhere, for which graphs are recorded anew.
            self._is_on = not self._blocks.has_begun
            self._traces = self._function.shared.counts.traces
            self._begin_anew(limits.LIMITS.calls_before_comparing)
        if self._left:
            self._left -= 1
            return self._as_it_is(args, kwargs) if self._is_faster_as_it_is else by_graphs(args, kwargs)
        return self._measure(by_graphs, args, kwargs)

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._function.cache.inlined[FASTER] += 1
        return self._function.fn(*args, **kwargs)

    def _measure(self, by_graphs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        drivers = drivers_of(self._function)
        if surroundings.inline_reason() is not None:  # where nobody may wait for the device, as in a capture
            return by_graphs(args, kwargs)
        if not drivers or any(driver.is_exact for driver in drivers):  # whose clock is no clock of the host
            self._is_on = False
            return by_graphs(args, kwargs)
        result = self._blocks.run(lambda *args, **kwargs: by_graphs(args, kwargs), drivers, args, kwargs)
        if self._blocks.is_done:
            self._is_faster_as_it_is = self._blocks.is_faster_as_it_is()
            self._begin_anew(limits.LIMITS.calls_between_comparisons)
        return result

    def _begin_anew(self, left: int) -> None:
        self._left, self._blocks = left, Blocks(self._function)
