"""The cache of what is known of calls inside larger wholes."""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraph.composition.sites import Site


class Sites:
    """Sites by kind of call, or why there is none; the least recently found one makes room.

    Args:
        limit: How many are kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: collections.OrderedDict[Hashable, Site | str] = collections.OrderedDict()

    def get(self, key: Hashable) -> Site | str | None:
        """What is known of this kind of call."""
        return self._known.get(key)

    def put(self, key: Hashable, site: Site | str) -> None:
        """Remember it."""
        self._known[key] = site
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()
