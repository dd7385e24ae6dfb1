"""The cache of one function: entries by kind of call, their native plans, and what has been counted of calls."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from pygraph.calls import limits
from pygraph.calls.call_plan import CallPlan
from pygraph.calls.counts import Counts
from pygraph.calls.entries import Entry, Recorded
from pygraph.calls.keys import Key, Kind, form_of
from pygraph.calls.new_kinds import NewKinds
from pygraph.calls.plans import CallPath
from pygraph.calls.retries import Budget, Looks, TracesByForm
from pygraph.calls.variants import Variants
from pygraph.ir.descriptors import Fallback
from pygraph.process.log import log
from pygraph.runtime.common_graphs import CommonGraphs
from pygraph.runtime.driver import Pool
from pygraph.tracing.number_uses import UsedNumbers


class CacheInfo(NamedTuple):
    """Statistics of a transformed function, as of ``functools.lru_cache``."""

    hits: int
    misses: int
    captures: int
    evictions: int
    size: int


class Shared:
    """State that a function shares with those that are derived from it.

    Attributes:
        lock: The turn of a thread: replays share memory.
        counts: The calls of all of them.
        pools: The memory of their graphs, by device.
        common: Graphs that several of their ways have in common.
        releases: Functions that give back graphs which a finalizer could not, called before the next compilation.
        late_kinds: The budget of compiling kinds of calls beyond a function's first few.
        asking_too_often: Lines that have asked for values on the device too often in a trace.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.counts = Counts()
        self.pools: dict[torch.device, Pool] = {}
        self.common = CommonGraphs()
        self.releases: collections.deque[Callable[[], None]] = collections.deque()
        self.late_kinds = Budget(0, limits.LIMITS.late_kind_share)
        self.asking_too_often = set[str | None]()

    def forget_graphs(self) -> None:
        """Forget the memory of graphs and what they have in common, as all of them are given back."""
        self.pools.clear()
        self.common.clear()


class Cache:
    """Entries of one function, their native plans, and counts of its calls.

    Args:
        name: What messages call the function.
        max_graphs: The number of entries that are kept.
        shared: State that is shared with other functions' caches.
        seldom: Why a call of a new kind is not compiled, where kinds seldom come again.
        single_kinds: Kinds of calls that are compiled in any case.
        is_users: Whether its calls are the user's, and no other function's that is called instead.
        is_patient: Whether no kind of calls is compiled before it comes again.

    Attributes:
        entries: The entries.
        native: Their plans in the extension.
        looks: Calls that run as they are without a lookup.
        traces: The budgets of traces of calls, by their form.
        new_kinds: Which new kinds of calls are compiled at once.
        inlined: Calls that ran as they are without an entry, by reason.
        baked: By kind of call, the leaves whose numbers decide what such calls do, so that they are part of the key.
        used_numbers: By kind of call, what such calls ask of these numbers.
        seconds: The time that all traces and recordings have taken.
    """

    def __init__(
        self,
        name: str,
        max_graphs: int,
        shared: Shared,
        seldom: Fallback,
        single_kinds: int = limits.LIMITS.single_kinds,
        *,
        is_users: bool = False,
        is_patient: bool = False,
    ) -> None:
        self._name = name
        self.entries = Variants[Key, Entry](max_graphs, self._forget)
        self.native = CallPath(shared.lock)
        self.looks = Looks[Entry]()
        self.inlined: collections.Counter[Fallback] = collections.Counter()
        self.seconds = 0.0
        self._counts, self._is_users = shared.counts, is_users
        if is_users:
            shared.counts.paths.add(self.native)
        self.baked: dict[Kind, frozenset[int]] = {}
        self.used_numbers: dict[Kind, UsedNumbers] = {}
        self._looks_again: collections.Counter[Kind] = collections.Counter()
        self.traces = TracesByForm()
        self.new_kinds = NewKinds(shared.late_kinds, seldom, single_kinds, is_patient=is_patient)
        self._seen: set[Key] = set()
        self._evictions_in_a_row = 0

    # -- entries ----------------------------------------------------------------------------------------------------

    def add(self, plan: CallPlan, entry: Entry) -> Entry:
        """Keep a new entry, and drop the least recently used ones if there are too many."""
        entry.plan = plan
        entry.calls = 1
        entry.traces = self.traces.of(form_of(plan.key.kind))
        entry.stamp = self.native.tick()
        evicted = self.entries.add(plan.key, entry)
        if evicted:
            log.info("%s: a kind of calls made room for another, as max_graphs=%d", self._name, self.entries.limit)
        self._counts.evictions += evicted
        self._evictions_in_a_row += evicted
        return entry

    def make_room(self, key: Key) -> Recorded | None:
        """Drop the entries of a key that no call will run again.

        Returns:
            One of them of which only tensors have moved: its trace is still good.
        """
        moved = [entry for entry in self.entries.of(key) if isinstance(entry, Recorded) and entry.has_only_moved()]
        self.entries.make_room(key)
        return moved[-1] if moved else None

    def _forget(self, entry: Entry) -> None:
        """Give back the graphs of an entry that was dropped."""
        self.native.drop(entry)
        self.looks.forget(entry)
        self.new_kinds.note_dropped(entry)
        entry.release()

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self.native.clear()
        self.looks.clear()
        self.settle()
        self.baked.clear()
        self.used_numbers.clear()
        self._looks_again.clear()
        self.traces.clear()
        self.new_kinds.clear()
        self._seen.clear()
        self.inlined.clear()
        self._evictions_in_a_row = 0

    # -- numbers that are part of keys ------------------------------------------------------------------------------

    def bake(self, kind: Kind, leaves: frozenset[int]) -> None:
        """Have the numbers at some leaves be part of the key of calls of a kind from now on."""
        self.baked[kind] = self.baked.get(kind, frozenset()) | leaves

    def may_look_again(self, kind: Kind) -> bool:
        """Whether a trace is to find out again which numbers a kind of calls needs, as another path may need others."""
        self._looks_again[kind] += 1
        return kind not in self.used_numbers and self._looks_again[kind] <= limits.LIMITS.number_looks

    def unbake(self, kind: Kind, leaves: frozenset[int]) -> None:
        """Have numbers at some leaves be no part of the key any more, and drop what is kept for their values."""
        self.baked[kind] = self.baked.get(kind, frozenset()) - leaves
        for entry in [one for one in self.entries if one.plan is not None and one.plan.key.kind == kind]:
            self.entries.drop(entry)

    # -- budgets ----------------------------------------------------------------------------------------------------

    def is_past_budget(self, key: Key) -> bool:
        """Whether a new kind of call is not compiled, as kinds only push out each other before they are used again."""
        limit, turnover = self.entries.limit, self.entries.turnover
        if len(self.entries) < limit:
            return False
        only_turns_over = self._evictions_in_a_row >= 2 * limit or not turnover.allows()
        if not only_turns_over or (key in self._seen and turnover.allows()):
            return False
        if len(self._seen) < limits.LIMITS.forms:
            self._seen.add(key)
        return True

    # -- counts -----------------------------------------------------------------------------------------------------

    def count_hit(self, entry: Entry) -> None:
        """Count a call that an entry serves."""
        entry.calls += 1
        self._note_used(entry)
        if self.native.dispatch is not None:
            entry.stamp = self.native.tick()
        self.entries.touch(entry)

    def _note_used(self, entry: Entry) -> None:
        """Note that an entry's trace serves another call."""
        if entry.traces is not None and not entry.counts_itself:
            entry.traces.note_used(entry.calls)
        if self._evictions_in_a_row:
            self._evictions_in_a_row = 0
            self._seen.clear()

    def is_skipped(self, look: Hashable) -> bool:
        """Whether a call that looks like this runs as it is without a lookup; it is counted then."""
        if not self.looks.is_skipped(look):
            return False
        if not self._is_users and self.looks.known[look].entry is None:
            self._counts.note_as_it_is()
        return True

    def settle(self) -> None:
        """Count the calls that the extension has served and those that were skipped."""
        for note, entry, calls in self.looks.take_skipped():
            if entry is not None:
                entry.calls += calls
                if entry in self.entries:
                    entry.stamp = self.native.tick()
                    self.entries.touch(entry)
            elif note is not None:
                self.inlined[note] += calls
                self._counts.skipped += calls if self._is_users else 0  # those of others are counted at once
        served = self.native.served()
        for calls in served:
            self._counts.calls += calls.hits if self._is_users else 0
            calls.entry.calls += calls.hits
            calls.entry.stamp = max(calls.entry.stamp, calls.stamp)
            self._note_used(calls.entry)
        if served:
            self.entries.order()

    def __len__(self) -> int:
        """The number of kinds of calls that are not counted elsewhere."""
        return sum(not entry.counts_itself for entry in self.entries)
