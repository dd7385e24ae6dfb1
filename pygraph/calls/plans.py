"""The plans of one transformed function: calls that the extension takes, and counts of the calls that it served.

A plan is made from a call that the path in Python has just served. Where a call is of a kind that cannot be described,
there is no plan, and Python serves it again.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from pygraph.calls import limits
from pygraph.calls.call_plan import CallPlan
from pygraph.calls.entries import Entry
from pygraph.calls.function import Call
from pygraph.calls.plan_description import describe_plan, is_describable
from pygraph.ir.value_keys import has_objects_by_value
from pygraph.process import extension
from pygraph.process.reentrancy import here, members
from pygraph.runtime.driver import Counters, add_replay_source


@dataclasses.dataclass(eq=False)
class Planned:
    """A plan in C++ with its entry, and its counts as of the last report."""

    plan: Any
    entry: Entry
    counters: Counters | None
    hits: int = 0
    replays: int = 0
    patches: int = 0

    @property
    def stamp(self) -> int:
        """The time of the last call that it served, by the clock of its function; zero if there was none."""
        return self.plan.stamp


@dataclasses.dataclass(frozen=True)
class Served:
    """Calls that a plan has served since the last report; ``stamp`` orders entries by their last calls."""

    entry: Entry
    hits: int
    stamp: int


class CallPath:
    """The native side of one transformed function.

    Args:
        lock: The function's lock; replays take it without waiting.

    Attributes:
        dispatch: ``dispatch(args, kwargs)`` gives the result, or ``miss``; None as long as there is no plan.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._dispatcher: Any = None
        self._made: list[Planned] = []
        self._removed: list[Served] = []
        self.dispatch: Any = None
        self.miss: object = None
        _paths.add(self)

    def plan(self, plan: CallPlan, entry: Entry, call: Call) -> Planned | None:
        """Have calls like this one served natively from now on, if that is possible.

        Args:
            plan: The plan of such calls.
            entry: The entry that counts them.
            call: The call.

        Returns:
            The plan, for `discard`; None if there is none.
        """
        module = extension.loaded()
        if module is None or entry.plans >= limits.LIMITS.plans or not is_describable(call.leaves, plan.live):
            return None
        # Their guards are those of an earlier call's, also where they are keys of a dict.
        if has_objects_by_value(call.structure) or has_objects_by_value(plan.key.kind.leaves):
            return None
        most_hits = self._most_hits(entry)
        if most_hits == 0:
            return None
        entry.plans += 1
        try:
            native = module.Plan(call.args, call.kwargs, describe_plan(plan, call, most_hits))
        except ValueError:  # there is a container among the arguments that C++ does not read
            return None
        if self._dispatcher is None:
            self._dispatcher = module.Dispatcher(self._lock.acquire, self._lock.release, here)
        executable = plan.executable
        counters = executable.driver.counters if executable is not None and native.way == "replay" else None
        made = Planned(native, entry, counters)
        self._made.append(made)
        self._dispatcher.add(native)
        self.miss, self.dispatch = module.MISS, self._dispatcher.dispatch
        return made

    def _most_hits(self, entry: Entry) -> int | None:
        """How many calls a new plan of an entry may serve before one is to take the path in Python; None for all."""
        if entry.most_calls is None:
            return None
        unsettled = sum(made.plan.hits - made.hits for made in self._made if made.entry is entry)
        return max(entry.most_calls - entry.calls - unsettled, 0)

    def match(self, args: tuple[Any, ...]) -> tuple[Any, Any] | None:
        """The dispatcher, and the plan of a call with these arguments; None if there is no such plan."""
        plan = None if self.dispatch is None else self._dispatcher.match(args, {})
        return None if plan is None else (self._dispatcher, plan)

    # -- counts -----------------------------------------------------------------------------------------------------

    def tick(self) -> int:
        """The next stamp of the clock that stamps plans."""
        return 0 if self._dispatcher is None else self._dispatcher.tick()

    def every_unsettled(self) -> int:
        """How many calls plans have served since the last `served`."""
        new = sum(made.plan.hits - made.hits for made in self._made)
        return new + sum(served.hits for served in self._removed)

    def served(self) -> list[Served]:
        """Calls that plans have served since this was last called."""
        found, self._removed = self._removed, []
        for made in self._made:
            found += self._take(made)
        return found

    def _take(self, made: Planned) -> list[Served]:
        self._count_replays(made)
        hits, made.hits = made.plan.hits - made.hits, made.plan.hits
        return [Served(made.entry, hits, made.plan.stamp)] if hits else []

    def count_replays(self) -> None:
        """Add replays of these plans to the counters of their devices."""
        for made in self._made:
            self._count_replays(made)

    @staticmethod
    def _count_replays(made: Planned) -> None:
        if made.counters is not None:
            replays, made.replays = made.plan.hits - made.replays, made.plan.hits
            patches, made.patches = made.plan.patches - made.patches, made.plan.patches
            made.counters.replays += replays
            made.counters.launches += replays
            made.counters.patches += patches

    # -- removal ----------------------------------------------------------------------------------------------------

    def drop(self, entry: Entry) -> None:
        """Remove the plans of an entry, before its graphs are released, and make no others for it."""
        for made in [made for made in self._made if made.entry is entry]:
            self.discard(made)
        entry.plans = limits.LIMITS.plans

    def renew(self, entry: Entry) -> None:
        """Remove the plans of an entry; calls that Python serves make new ones."""
        for made in [made for made in self._made if made.entry is entry]:
            self.discard(made)

    def discard(self, made: Planned) -> None:
        """Remove a plan, unless it has been removed before."""
        if made in self._made:
            self._dispatcher.remove(made.plan)
            self._removed += self._take(made)
            self._made.remove(made)
            made.entry.plans -= 1

    def clear(self) -> None:
        """Remove all plans."""
        if self._dispatcher is not None:
            self._dispatcher.clear()
        for made in self._made:
            self._removed += self._take(made)
        self._made = []
        self.dispatch = None


_paths: weakref.WeakSet[CallPath] = weakref.WeakSet()


def count_replays() -> None:
    """Add replays of plans to the counters of their devices."""
    for path in members(_paths):
        path.count_replays()


add_replay_source(count_replays)
