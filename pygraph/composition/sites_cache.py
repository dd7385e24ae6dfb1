"""The cache of what is known of calls inside larger wholes."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pygraph.entries import MOST_VARIANTS

if TYPE_CHECKING:
    from pygraph.composition.sites import Refused, Site
    from pygraph.transformed import Transformed


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
        self._known: collections.OrderedDict[Hashable, tuple[Site | Refused, ...]] = collections.OrderedDict()
        self.baked: dict[Hashable, tuple[int, ...]] = {}

    def get(self, key: Hashable) -> Site | Refused | None:
        """What is known of this kind of call, and still so."""
        return next((site for site in self._known.get(key, ()) if site.is_current()), None)

    def latest(self, key: Hashable) -> Site | Refused | None:
        """What was found out last of this kind of call."""
        return next(iter(self._known.get(key, ())), None)

    def put(self, key: Hashable, site: Site | Refused) -> None:
        """Remember it, and forget what is outdated for good."""
        before = self._known.pop(key, ())
        kept = [other for other in before if other.may_return()][: MOST_VARIANTS - 1]
        _forget(other for other in before if other not in kept)
        self._known[key] = (site, *kept)
        while len(self._known) > self._limit:
            _forget(self._known.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all."""
        self.baked.clear()
        while self._known:
            _forget(self._known.popitem()[1])

    def engines(self) -> Iterator[Transformed[..., Any]]:
        """The compiled functions of all sites."""
        for known in list(self._known.values()):
            for site in known:
                yield from site.engines()


def _forget(known: Iterable[Site | Refused]) -> None:
    """Give back the graphs of sites; a backward that is still to come records its own again."""
    for site in known:
        site.discard_plans()
        for engine in list(site.engines()):
            engine.forget()
