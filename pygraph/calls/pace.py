"""Whether a user's calls keep pace with the function as it is: where they do not, they run as it is.

A graph is faster than what it was recorded from, or it is not chosen. What comes around it is Python: guards, state
that is read and stored, statements between graphs, and traces where calls are unlike each other again and again. In a
small function that may be more than graphs gain. So calls that nothing is compiled for are timed, and those that take
longer than launching their kernels does are compared with the function itself; so are calls that come to no rest.
"""

# Functions here are of any type, and so is what they are called with; an engine is part of what it is made from.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import collections
import statistics
import threading
from typing import Any

from pygraph.calls import limits, retries, surroundings
from pygraph.calls.comparing import CLEARLY, FASTER, MUCH, Blocks, compares, drivers_of, requires_grad
from pygraph.calls.engine import Engine
from pygraph.calls.entries import Differentiated
from pygraph.ir.descriptors import Fallback
from pygraph.ir.effects import count_kernels
from pygraph.process.reentrancy import here

_RESTLESS = Fallback("the call", "its calls are compiled again and again, and it was faster as it is")

_EARLY = 4
"""Calls without a compilation after which a call may be found to take much longer than the function as it is."""

_MUCH_WITH_BACKWARD = 0.1
"""A share as `MUCH` is one, of calls that are compiled again and again, whose backward is not timed."""

_RESTLESS_CALLS, _RECENT, _OFTEN = 16, 8, 2
"""Calls after which a function may be found to come to no rest: if so many of the recent ones were compiled."""
_LONG_CALLS, _LONG = 6, 30.0
"""Fewer calls suffice where they have taken so many seconds together, and half of the recent ones were compiled."""

_PER_KERNEL = 8e-6
"""Seconds of the host that each kernel stands for, with the operation around it: calls that take less keep pace."""


class Pace:
    """Runs the calls of a function, as long as it is not known which way is the faster one.

    Args:
        engine: The engine of the function.

    Attributes:
        watches: Whether calls are to come by `run`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.watches = compares(engine)
        self._way: Fallback | None = None  # why calls run as they are
        self._left, self._until = 0, 0.0
        self._thread: int | None = None  # whose calls are timed
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._way, self._blocks = None, None
        self._calls = self._quiet = 0
        self._spent = 0.0
        self._kernels = 0  # at the first of the calls for which nothing is compiled
        self._recent = collections.deque[tuple[bool, float]](maxlen=_RECENT)  # whether it was compiled, and its seconds
        self._compilations = self._engine.shared.counts.compilations

    def note_compilations(self) -> None:
        """Watch calls again, if something has been compiled since they were watched."""
        if self._compilations != self._engine.shared.counts.compilations and compares(self._engine):
            self._begin_anew()
            self.watches = True

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        engine, self._thread = self._engine, self._thread or threading.get_ident()
        if here.inside or surroundings.inline_reason() is not None:
            return engine(*args, **kwargs)
        if self._way is not None:
            if self._left > 0 or retries.clock() < self._until:
                self._left -= 1
                self._note_as_it_is()
                engine.cache.inlined[self._way] += 1
                return engine.fn(*args, **kwargs)
            self._begin_anew()
        if self._thread != threading.get_ident():
            return engine(*args, **kwargs)
        if self._blocks is not None:
            return self._measure(self._blocks, args, kwargs)
        return self._watch(args, kwargs)

    def _note_as_it_is(self) -> None:
        counts = self._engine.shared.counts
        counts.calls += 1
        counts.note_as_it_is()

    def _watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts, begin = self._engine.shared.counts, retries.clock()
        before = counts.compilations
        result = self._engine(*args, **kwargs)
        seconds = retries.clock() - begin
        self._compilations = counts.compilations
        is_compiled = self._compilations != before
        self._recent.append((is_compiled, seconds))
        self._calls, self._spent = self._calls + 1, self._spent + seconds
        self._quiet = 0 if is_compiled else self._quiet + 1
        if self._quiet == 1:
            self._kernels = self._kernels_until_now()
        if self._quiet in (_EARLY, limits.LIMITS.calls_before_comparing):
            self._compare_settled(result)
        elif self._is_restless():
            clearly = _MUCH_WITH_BACKWARD if self._has_backward(result) else MUCH
            mean = statistics.mean(seconds for _, seconds in self._recent)
            self._blocks = Blocks(self._engine, 1, clearly, mean)
        return result

    def _compare_settled(self, result: Any) -> None:
        """Compare what calls take for which nothing is compiled any more; end, if there is nothing to be found."""
        is_early = self._quiet == _EARLY
        if self._has_backward(result) or not self._is_slow():
            self.watches = False
        else:
            self._blocks = Blocks(self._engine, 2 if is_early else 4, MUCH if is_early else CLEARLY)

    def _is_restless(self) -> bool:
        """Whether something is compiled in calls again and again."""
        compiled = sum(is_compiled for is_compiled, _ in self._recent)
        is_long = self._calls >= _LONG_CALLS and self._spent >= _LONG and 2 * compiled >= len(self._recent)
        return is_long or (self._calls >= _RESTLESS_CALLS and compiled >= _OFTEN)

    def _has_backward(self, result: Any) -> bool:
        """Whether a call is but a part of what is to be compared, as graphs are its backward, which comes later."""
        entries = self._engine.cache.entries
        return requires_grad(result) and any(isinstance(entry, Differentiated) for entry in entries)

    def _is_slow(self) -> bool:
        """Whether the last call has taken longer than launching its kernels takes at least."""
        kernels = (self._kernels_until_now() - self._kernels) / max(self._quiet - 1, 1)
        return self._recent[-1][1] > kernels * _PER_KERNEL

    def _kernels_until_now(self) -> int:
        """The number of kernels in all calls of the function until now, as far as graphs know of them."""
        found = 0
        for engine in self._engine.family():
            engine.cache.settle()
            programs = [(entry.calls, entry.program) for entry in list(engine.cache.entries)]
            found += sum(calls * count_kernels(program.nodes) for calls, program in programs if program is not None)
        return found

    def _measure(self, blocks: Blocks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        drivers = drivers_of(self._engine, (args, kwargs))
        if any(driver.is_exact for driver in drivers):  # whose clock is no clock of the host
            self.watches = False
            return self._engine(*args, **kwargs)
        if not blocks.is_by_graphs:
            self._note_as_it_is()
        result = blocks.run(self._engine, drivers, args, kwargs)
        if not blocks.is_done:
            return result
        self._blocks, counts = None, self._engine.shared.counts
        is_restless, late = blocks.is_of_one_way, limits.LIMITS.calls_before_comparing
        if blocks.is_faster_as_it_is():
            self._way, self._left = _RESTLESS if is_restless else FASTER, limits.LIMITS.calls_between_comparisons
            if is_restless:
                self._left, self._until = _RESTLESS_CALLS, retries.clock() + self._spent / limits.LIMITS.restless_share
        elif is_restless:
            self._begin_anew()
        elif counts.compilations != self._compilations or self._quiet >= late:
            self.watches = False  # calls as they are may leave tensors elsewhere, for which graphs are recorded anew
        self._compilations = counts.compilations
        return result
