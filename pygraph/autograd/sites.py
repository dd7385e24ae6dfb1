"""The cache of sites of one function."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Iterator

from pygraph.autograd.site import Refused, Site
from pygraph.calls import limits
from pygraph.calls.engine import Engine
from pygraph.calls.retries import Budget, Traces, TracesByForm


class Sites:
    """Sites by kind of call, or the reasons why there are none; the oldest kind is evicted first.

    A kind has several sites where the function's state changes from call to call: the parameters of a module that each
    iteration of an inner loop replaces are batched or have other strides, or the module is in training or not.

    Args:
        limit: How many kinds are cached.

    Attributes:
        traces: The budgets of traces of calls, by their form.
        baked: By kind of call, the leaves whose numbers distinguish sites: they decide which operations the function
            runs.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.traces = TracesByForm()
        # Traces of kinds of calls that were evicted before they had been used a few times.
        self._turnover = Budget(2 * limit, limits.LIMITS.trace_share)
        self._known: collections.OrderedDict[Hashable, tuple[Site | Refused, ...]] = collections.OrderedDict()
        self.baked: dict[Hashable, tuple[int, ...]] = {}

    def get(self, key: Hashable) -> Site | Refused | None:
        """Return the current site of a kind of call, or why there is none; None if that is not known."""
        return next((site for site in self._known.get(key, ()) if site.is_current()), None)

    def latest(self, key: Hashable) -> Site | Refused | None:
        """Return the newest site of a kind of call, or why there is none."""
        return next(iter(self._known.get(key, ())), None)

    def refusal(self, key: Hashable, traces: Traces, *, of_objects: bool) -> str | None:
        """Return why a call of a kind that has no current site is not traced; None if it may be.

        Args:
            key: The kind.
            traces: The budget of its form.
            of_objects: Whether an argument is an object that is compared by identity.
        """
        last = self.latest(key)
        if last is not None or of_objects:
            more = 0.0 if last is None else _recorded(last)
            traces.is_outdated(wasted=last is not None and not last.calls, more=more)
        if not traces.allow_another():
            changed = None if last is None else last.changed()
            _forget(self._known.pop(key, ()))
            if last is None:
                return "an object that it is passed is another one at every call"
            return f"{changed or 'something that the function closes over'} changes at every call"
        if last is None and len(self._known) >= self._limit and not self._turnover.allows():
            return f"past the budget of {self._limit} graphs"
        return None

    def put(self, key: Hashable, site: Site | Refused) -> None:
        """Add a site, and forget the ones that cannot be current again."""
        before = self._known.pop(key, ())
        remaining = [other for other in before if other.may_return()][: limits.LIMITS.variants - 1]
        _forget(other for other in before if other not in remaining)
        self._known[key] = (site, *remaining)
        while len(self._known) > self._limit:
            _, oldest = self._known.popitem(last=False)
            if any(other.calls >= limits.LIMITS.settled_calls for other in oldest):
                self._turnover.renew()
            else:
                self._turnover.lose(sum(other.seconds + _recorded(other) for other in oldest))
            _forget(oldest)

    def clear(self) -> None:
        """Forget all sites."""
        self.baked.clear()
        self.traces.clear()
        self._turnover.renew()
        while self._known:
            _forget(self._known.popitem()[1])

    def engines(self) -> Iterator[Engine]:
        """Iterate over the engines of all sites."""
        for known in list(self._known.values()):
            for site in known:
                yield from site.engines()


def _recorded(known: Site | Refused) -> float:
    """Return how long the engines of a site have compiled, in seconds."""
    return sum(engine.cache.seconds for engine in known.engines())


def _forget(known: Iterable[Site | Refused]) -> None:
    """Give back the graphs of sites; a later backward of an earlier call records its own again."""
    for site in known:
        site.discard_plans()
        for engine in list(site.engines()):
            engine.release()
