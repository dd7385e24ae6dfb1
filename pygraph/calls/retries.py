"""When calls that run as they are are looked at, or traced, again: for a share of the time that passes.

Finding out what a call is, and tracing it, costs time that a call which then runs as it is has lost. A few losses are
free, since much of what is in the way at first is not later (an attribute that is filled, a flag that is set). After
these there is a budget in time, whatever the number of calls is: a loss of one second at a share of 1 % is made again
after 100 seconds in which the process has computed.
"""

# The length of a stack of modes is known to torch._C only. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack  # checked with torch 2.11 and 2.13

from pygraph.calls import limits
from pygraph.ir.descriptors import Fallback
from pygraph.process.reentrancy import here

E = TypeVar("E")
"""The entry of a kind of call."""

clock = time.perf_counter
"""Seconds that pass."""

cpu_clock = time.process_time
"""Seconds that the process computes: while it waits for requests, or for its turn, no time is gained for losses."""


class Budget:
    """Losses that are free at first, and then may take a share of the time.

    Args:
        free: How many in a row are free.
        share: The share of the time, of all after that.

    Example:
        >>> budget = Budget(free=1, share=0.01)
        >>> budget.lose(0.5)
        >>> budget.allows()  # the first one was free
        True
        >>> budget.lose(0.5)
        >>> budget.allows()  # not before 50 seconds have passed
        False
    """

    def __init__(self, free: int, share: float) -> None:
        self._free, self._share = free, share
        self._losses = 0
        self._again = self._cpu_again = 0.0

    def allows(self) -> bool:
        """Whether there may be another loss now."""
        # The time that passes costs much less to read.
        return self._losses <= self._free or (clock() >= self._again and cpu_clock() >= self._cpu_again)

    def lose(self, seconds: float, count: int = 1) -> None:
        """Note losses, and the time that they took together."""
        self._losses += count
        again = seconds / self._share
        # A short loss does not end what a long one has begun.
        self._again, self._cpu_again = max(self._again, clock() + again), max(self._cpu_again, cpu_clock() + again)

    def renew(self) -> None:
        """Note a gain: the next losses are free again."""
        self._losses = 0
        self._again = self._cpu_again = 0.0


class Traces:
    """The budget of traces of calls that differ only in closed-over state or in objects without a value."""

    def __init__(self) -> None:
        self._seconds: float | None = None  # what the last one took, as long as it is not known to be lost
        self._wasted = Budget(limits.LIMITS.wasted_traces, limits.LIMITS.trace_share)
        self._outdated = Budget(limits.LIMITS.outdated_traces, limits.LIMITS.trace_share)

    def note_made(self, seconds: float) -> None:
        """Note a new trace, and the time that it took."""
        self._seconds = seconds

    def note_outdated(self, *, wasted: bool, more: float = 0.0) -> None:
        """Note that the last trace does not serve a call of its form.

        Args:
            wasted: Whether it has served no call but its own.
            more: The seconds that recording and other work took after the trace.
        """
        if self._seconds is None:
            return
        self._outdated.lose(self._seconds + more)
        if wasted:
            self._wasted.lose(self._seconds + more)
        else:
            self._wasted.renew()
        self._seconds = None

    def note_unsteady(self, seconds: float) -> None:
        """Note that traces of such calls come to nothing, however often they are made, and the time that they took."""
        self._outdated.lose(seconds, limits.LIMITS.wasted_traces)

    def note_used(self, calls: int) -> None:
        """Note how many calls a trace has served."""
        if calls >= limits.LIMITS.settled_calls:
            self._outdated.renew()

    def allow_another(self) -> bool:
        """Whether there may be another trace now."""
        return self._wasted.allows() and self._outdated.allows()


class TracesByForm:
    """The budgets of traces of calls, by their form; they begin anew where there are too many forms."""

    def __init__(self) -> None:
        self._traces: dict[Hashable, Traces] = {}

    def get(self, form: Hashable) -> Traces | None:
        """The budget of a form; None if there is none yet."""
        return self._traces.get(form)

    def of(self, form: Hashable) -> Traces:
        """The budget of a form."""
        if len(self._traces) > limits.LIMITS.forms:
            self._traces.clear()
        return self._traces.setdefault(form, Traces())

    def clear(self) -> None:
        """Forget all budgets."""
        self._traces.clear()


class Look(Generic[E]):
    """Calls that look alike.

    Attributes:
        lookups: The budget of lookups of such calls.
        note: Why the last one ran as it is; None if that is no fallback, and then there is an entry.
        entry: The entry of the cache that says so, if there is one.
        skipped: How many ran without a lookup, and are not counted elsewhere yet.
        unseen: How many ran without a lookup since the last lookup.
    """

    def __init__(self, note: Fallback | None) -> None:
        self.lookups = Budget(limits.LIMITS.lookups - 1, limits.LIMITS.lookup_share)
        self.note = note
        self.entry: E | None = None
        self.skipped = self.unseen = 0


class Looks(Generic[E]):
    """The calls of one function that run as they are without a lookup, since calls of the same look did.

    A mistake can only be that a call runs as it is which could be a graph.

    Attributes:
        known: The calls, by their looks; while it is empty, no call needs to be compared with it.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, Look[E]] = {}
        self._skipped: list[tuple[Fallback | None, E | None, int]] = []

    def is_skipped(self, look: Hashable) -> bool:
        """Whether a call runs without a lookup; it is counted then."""
        known = self.known.get(look)
        if known is None or known.lookups.allows():
            return False
        known.skipped += 1
        known.unseen += 1
        return True

    def are_all_skipped(self) -> bool:
        """Whether a call of any look that is known would run without a lookup."""
        looks = list(self.known.values())
        return bool(looks) and not any(look.lookups.allows() for look in looks)

    def as_it_is(self, look: Hashable, note: Fallback | None, entry: E | None, seconds: float) -> int:
        """Note that a call runs as it is after a lookup, and the time of the lookup.

        Returns:
            How many calls it stands for: itself, and those since the last lookup.
        """
        known = self.known.get(look)
        if known is None:
            if len(self.known) >= limits.LIMITS.looks:
                self.clear()
            known = self.known.setdefault(look, Look[E](note))
        elif known.skipped and (known.note != note or known.entry is not entry):
            self._take(known)
        known.note, known.entry = note, entry
        known.lookups.lose(min(seconds, limits.LIMITS.longest_lookup))
        calls, known.unseen = 1 + known.unseen, 0
        return calls

    def served(self, look: Hashable) -> None:
        """Note that a call did not run as it is."""
        known = self.known.pop(look, None)
        if known is not None:
            self._take(known)

    def forget(self, entry: E) -> None:
        """Look up the calls of an entry again, which has been dropped."""
        for look, known in list(self.known.items()):
            if known.entry is entry:
                self.served(look)

    def clear(self) -> None:
        """Look up all calls again."""
        for look in list(self.known):
            self.served(look)

    # -- counts ---------------------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> int:
        """How many calls of entries ran without a lookup since the last `take_skipped`."""
        waiting = [*self._skipped, *((known.note, known.entry, known.skipped) for known in list(self.known.values()))]
        return sum(calls for _, entry, calls in waiting if entry is not None)

    def take_skipped(self) -> list[tuple[Fallback | None, E | None, int]]:
        """The calls that ran without a lookup since the last time: why, by which entry, and how many."""
        for known in list(self.known.values()):
            self._take(known)
        found, self._skipped = self._skipped, []
        return found

    def _take(self, known: Look[E]) -> None:
        calls, known.skipped = known.skipped, 0
        if calls:
            self._skipped.append((known.note, known.entry, calls))


def look_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """The look of a call at a glance: the types of its arguments, flags and texts, and what surrounds it."""
    interpreter: Any = peek_interpreter_stack()
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    seen: list[Any] = [here.inside, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), interpreter is None]
    seen += modes
    types = list(map(type, args))
    if _SEEN.isdisjoint(types):
        seen += types
    else:
        seen += [value if type(value) in _SEEN else type(value) for value in args]
    if kwargs:
        seen += kwargs
        seen += [value if type(value) in _SEEN else type(value) for value in kwargs.values()]
    return tuple(seen)


_SEEN = frozenset({bool, str})
