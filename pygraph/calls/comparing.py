"""Whether calls in which Python has a part are faster by their graphs or as they are: the calls themselves tell.

Between graphs of one call, Python asks, decides and runs statements. What that costs is in no measurement of graphs,
and may be more than they gain: where a call goes another way each time, or its graphs are of a few kernels. Once
nothing is compiled any more, some calls run by graphs and some as they are, and the others run as the faster ones.
"""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from pygraph.calls import limits, retries, surroundings
from pygraph.calls.engine import Engine
from pygraph.ir.descriptors import Fallback
from pygraph.runtime.devices import driver_for

_FASTER = Fallback("the call", "it was faster as it is than by its graphs with Python in between")
MEASURES = True
"""Whether anything is compared; tests do not, as what they see would depend on time."""

_BLOCK = 4
"""Calls of one kind in a row, of which the first does not count."""
_BLOCKS = 4
_CLEARLY = 0.9


class Comparison:
    """Runs calls by graphs or as they are, whichever is faster.

    Args:
        function: The engine of the function.
    """

    def __init__(self, function: Engine) -> None:
        self._function = function
        options, passes = function.function.options, function.function.passes
        policy = options.selection
        self._is_on = any(one.is_measured for one in passes) and policy.measures and not options.strict
        self._is_on = self._is_on and policy.timer is None  # which is for graphs alone
        self._is_faster_as_it_is = False
        self._traces = -1
        self._left = limits.LIMITS.calls_before_comparing
        self._seconds: tuple[list[float], list[float]] = ([], [])
        self._measured = 0

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
            self._is_on = not self._measured
            self._traces = self._function.shared.counts.traces
            self._begin_anew(limits.LIMITS.calls_before_comparing)
        if self._left:
            self._left -= 1
            return self._as_it_is(args, kwargs) if self._is_faster_as_it_is else by_graphs(args, kwargs)
        return self._measure(by_graphs, args, kwargs)

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._function.cache.inlined[_FASTER] += 1
        return self._function.fn(*args, **kwargs)

    def _measure(self, by_graphs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        drivers = [driver for driver in map(driver_for, self._function.shared.pools) if driver is not None]
        if surroundings.inline_reason() is not None:  # where nobody may wait for the device, as in a capture
            return by_graphs(args, kwargs)
        if not drivers or any(driver.is_exact for driver in drivers):  # whose clock is no clock of the host
            self._is_on = False
            return by_graphs(args, kwargs)
        number, self._measured = self._measured, self._measured + 1
        is_graphs = number // _BLOCK % 2 == 0
        for driver in drivers:
            driver.synchronize()
        begin = retries.clock()
        result = by_graphs(args, kwargs) if is_graphs else self._function.fn(*args, **kwargs)
        for driver in drivers:
            driver.synchronize()
        if number % _BLOCK:
            self._seconds[is_graphs].append(retries.clock() - begin)
        if self._measured == _BLOCK * _BLOCKS:
            if all(self._seconds):  # else calls have raised errors
                as_it_is, graphs = map(statistics.median, self._seconds)
                self._is_faster_as_it_is = as_it_is < _CLEARLY * graphs
            self._begin_anew(limits.LIMITS.calls_between_comparisons)
        return result

    def _begin_anew(self, left: int) -> None:
        self._left, self._measured, self._seconds = left, 0, ([], [])
