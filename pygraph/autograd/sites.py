"""The cache of what is known of calls inside larger wholes."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Iterator

from pygraph.autograd.site import Refused, Site
from pygraph.calls.cache import MOST_VARIANTS
from pygraph.calls.engine import Engine
from pygraph.calls.retries import SETTLED, TRACES, Budget, Traces


class Sites:
    """Sites by kind of call, or why there is none; the kind that was found out first makes room.

    A function may find other tensors from call to call, as a module does whose parameters each step of an inner loop
    replaces: others carry batches, or have other strides. Or it finds other flags and numbers, as a module does that is
    in training or not. There is one site for each.

    Args:
        limit: How many kinds are kept.

    Attributes:
        baked: By kind of call, the leaves whose numbers tell sites apart, as they decide what the function does.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._traces: dict[Hashable, Traces] = {}
        # Traces of kinds of calls that were pushed out by others before they had been used a few times.
        self._turnover = Budget(2 * limit, TRACES)
        self._known: collections.OrderedDict[Hashable, tuple[Site | Refused, ...]] = collections.OrderedDict()
        self.baked: dict[Hashable, tuple[int, ...]] = {}

    def get(self, key: Hashable) -> Site | Refused | None:
        """What is known of this kind of call, and still so."""
        return next((site for site in self._known.get(key, ()) if site.is_current()), None)

    def latest(self, key: Hashable) -> Site | Refused | None:
        """What was found out last of this kind of call."""
        return next(iter(self._known.get(key, ())), None)

    def traces_of(self, form: Hashable) -> Traces:
        """The budget of calls of one form."""
        if len(self._traces) > _MAX_FORMS:
            self._traces.clear()
        return self._traces.setdefault(form, Traces())

    def refusal(self, key: Hashable, traces: Traces, *, of_objects: bool) -> str | None:
        """Why a call of a kind is not traced although nothing that is known fits it; None if it may be.

        Args:
            key: The kind.
            traces: The budget of its form.
            of_objects: Whether it is passed an object without a value.
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
        """Remember it, and forget what is outdated for good."""
        before = self._known.pop(key, ())
        kept = [other for other in before if other.may_return()][: MOST_VARIANTS - 1]
        _forget(other for other in before if other not in kept)
        self._known[key] = (site, *kept)
        while len(self._known) > self._limit:
            _, oldest = self._known.popitem(last=False)
            if any(other.calls >= SETTLED for other in oldest):
                self._turnover.renew()
            else:
                self._turnover.lose(sum(other.seconds + _recorded(other) for other in oldest))
            _forget(oldest)

    def clear(self) -> None:
        """Forget all."""
        self.baked.clear()
        self._traces.clear()
        self._turnover.renew()
        while self._known:
            _forget(self._known.popitem()[1])

    def engines(self) -> Iterator[Engine]:
        """The compiled functions of all sites."""
        for known in list(self._known.values()):
            for site in known:
                yield from site.engines()


# Forms of calls of which it is remembered what their traces cost.
_MAX_FORMS = 4096


def _recorded(known: Site | Refused) -> float:
    """What the compiled functions of a site have taken, in seconds."""
    return sum(engine.cache.seconds for engine in known.engines())


def _forget(known: Iterable[Site | Refused]) -> None:
    """Give back the graphs of sites; a backward that is still to come records its own again."""
    for site in known:
        site.discard_plans()
        for engine in list(site.engines()):
            engine.release()
