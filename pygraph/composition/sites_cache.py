"""The cache of what is known of calls inside larger wholes."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pygraph.composition.sites import Site
    from pygraph.transformed import Transformed


class Sites:
    """Sites by kind of call, or why there is none; the least recently found one makes room.

    Args:
        limit: How many are kept.

    Attributes:
        baked: By kind of call, the leaves whose numbers tell sites apart, as they decide what the function does.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: collections.OrderedDict[Hashable, Site | str] = collections.OrderedDict()
        self.baked: dict[Hashable, tuple[int, ...]] = {}

    def get(self, key: Hashable) -> Site | str | None:
        """What is known of this kind of call."""
        return self._known.get(key)

    def put(self, key: Hashable, site: Site | str) -> None:
        """Remember it."""
        _forget(self._known.pop(key, None))
        self._known[key] = site
        while len(self._known) > self._limit:
            _forget(self._known.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget all."""
        self.baked.clear()
        while self._known:
            _forget(self._known.popitem()[1])

    def engines(self) -> Iterator[Transformed[..., Any]]:
        """The compiled functions of all sites."""
        for site in list(self._known.values()):
            if not isinstance(site, str):
                yield from site.primal.engines()


def _forget(site: Site | str | None) -> None:
    """Give back the graphs of a site; a backward that is still to come records its own again."""
    if site is not None and not isinstance(site, str):
        for engine in list(site.primal.engines()):
            engine.forget()
