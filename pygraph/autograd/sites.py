"""The cache of sites of one function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from pygraph.autograd.site import Refused, Site
from pygraph.calls.engine import Engine
from pygraph.calls.retries import Traces, TracesByForm
from pygraph.calls.variants import Variants


class Sites:
    """Sites by kind of call, or the reasons why there are none.

    A kind has several sites where the function's state changes from call to call: the parameters of a module that each
    iteration of an inner loop replaces are batched or have other strides, or the module is in training or not.

    Args:
        limit: How many sites are cached.
        clock: Gives the time by which the function's native plans tell when they served a call.

    Attributes:
        traces: The budgets of traces of calls, by their form.
        baked: By kind of call, the leaves whose numbers distinguish sites: they decide which operations the function
            runs.
    """

    def __init__(self, limit: int, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._known = Variants[Hashable, "Site | Refused"](limit, _forget)
        self.traces = TracesByForm()
        self.baked: dict[Hashable, tuple[int, ...]] = {}

    def get(self, key: Hashable) -> Site | Refused | None:
        """Return the current site of a kind of call, or why there is none; None if that is not known."""
        return self._known.find(key)

    def note_used(self, found: Site | Refused) -> None:
        """Note a call of the kind of a site."""
        found.stamp = self._clock()
        self._known.touch(found)

    def settle(self) -> None:
        """Put sites in the order in which calls used them last, also calls that came by native plans."""
        for known in self._known:
            known.note_planned_calls()
        self._known.order()

    def latest(self, key: Hashable) -> Site | Refused | None:
        """Return the site of a kind of call that was used last, or why there is none."""
        return next(iter(self._known.of(key)), None)

    def refusal(self, key: Hashable, traces: Traces, *, of_objects: bool) -> str | None:
        """Return why a call of a kind that has no current site is not traced; None if it may be.

        Args:
            key: The kind.
            traces: The budget of its form.
            of_objects: Whether an argument is an object that is compared by identity.
        """
        last = self.latest(key)
        if last is not None or of_objects:
            more = 0.0 if last is None else last.seconds_of_engines
            traces.note_outdated(wasted=last is not None and not last.calls, more=more)
        if not traces.allow_another():
            changed = None if last is None else last.changed()
            self._known.drop_all(key)
            if last is None:
                return "an object that it is passed is another one at every call"
            return f"{changed or 'something that the function closes over'} changes at every call"
        if last is None and len(self._known) >= self._known.limit and not self._known.turnover.allows():
            return f"past the budget of {self._known.limit} graphs"
        return None

    def put(self, key: Hashable, site: Site | Refused) -> None:
        """Add a site, and forget the ones that cannot be current again."""
        site.stamp = self._clock()
        self._known.make_room(key)
        self._known.add(key, site)

    def clear(self) -> None:
        """Forget all sites."""
        self.baked.clear()
        self.traces.clear()
        self._known.clear()

    def engines(self) -> Iterator[Engine]:
        """Iterate over the engines of all sites."""
        for known in self._known:
            yield from known.engines()


def _forget(known: Site | Refused) -> None:
    """Give back the graphs of a site; a later backward of an earlier call records its own again."""
    known.discard_plans()
    for engine in list(known.engines()):
        engine.release()
