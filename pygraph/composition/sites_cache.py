"""The cache of what is known of calls inside larger wholes."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

from pygraph.entries import MOST_VARIANTS

if TYPE_CHECKING:
    from pygraph.composition.sites import Site
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
        self._known: collections.OrderedDict[Hashable, tuple[Site, ...] | str] = collections.OrderedDict()
        self.baked: dict[Hashable, tuple[int, ...]] = {}

    def get(self, key: Hashable) -> Site | str | None:
        """What is known of this kind of call, and still so."""
        known = self._known.get(key, ())
        if isinstance(known, str):
            return known
        return next((site for site in known if site.is_current()), None)

    def put(self, key: Hashable, site: Site | str) -> None:
        """Remember it, and forget what is outdated for good."""
        before = self._known.pop(key, ())
        if isinstance(site, str):
            _forget(before)
            self._known[key] = site
        else:
            others = () if isinstance(before, str) else before
            kept = [other for other in others if other.may_return()][: MOST_VARIANTS - 1]
            _forget(tuple(other for other in others if other not in kept))
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
            for site in () if isinstance(known, str) else known:
                yield from site.primal.engines()


def _forget(known: tuple[Site, ...] | str) -> None:
    """Give back the graphs of sites; a backward that is still to come records its own again."""
    for site in () if isinstance(known, str) else known:
        for engine in list(site.primal.engines()):
            engine.forget()
