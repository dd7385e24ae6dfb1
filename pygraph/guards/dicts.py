"""Guards on one dict of which a trace has read items: length, values, absent keys, order."""

# Dicts hold values of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from typing import Any

from pygraph.guards.values import same

_MISSING: Any = object()


@dataclasses.dataclass(slots=True, eq=False)
class DictGuard:
    """All guards on one dict.

    Attributes:
        container: The dict, of whatever class.
        length: How many items it has; -1 if that does not matter.
        entries: Keys and values.
        absent: Keys that it does not have.
        is_ordered: Whether `entries` are all that it has, in this order.
        is_namespace: Whether it holds the variables of a module.
    """

    container: dict[Any, Any]
    length: int = -1
    entries: list[tuple[Any, Any]] = dataclasses.field(default_factory=list[tuple[Any, Any]])
    absent: list[Any] = dataclasses.field(default_factory=list[Any])
    is_ordered: bool = False
    is_namespace: bool = False

    def holds(self) -> bool:
        """Whether the dict is as it was; nothing of its class is run."""
        container = self.container
        if self.length >= 0 and dict.__len__(container) != self.length:
            return False
        for key, expected in self.entries:
            now = dict.get(container, key, _MISSING)
            if now is not expected and not same(now, expected):
                return False
        if self.is_ordered and not self.is_in_order():
            return False
        return not any(dict.__contains__(container, key) for key in self.absent)

    def is_in_order(self) -> bool:
        """Whether its keys are those of `entries`, in this order."""
        return list(dict.__iter__(self.container)) == [key for key, _ in self.entries]
