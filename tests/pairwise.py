"""Choose among the cases of a full product so that every two values that occur together still do so.

Most faults that depend on several parameters show with two values of them (Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing", 2004).
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Mapping, Sequence


def cover(cases: Sequence[Mapping[str, Hashable]], strength: int = 2) -> list[int]:
    """Positions of cases in which every combination of ``strength`` values occurs that occurs in any case.

    Args:
        cases: The values of the parameters in each case. All cases have the same parameters.
        strength: How many parameters are looked at together: 2 for pairs of values, 1 for single values.

    Returns:
        Positions in ascending order; the same ones for the same cases. Single values are taken in turn.

    Examples:
        >>> cases = [{"a": a, "b": b, "c": c} for a in "xy" for b in "xy" for c in "xy"]
        >>> [tuple(cases[position].values()) for position in cover(cases)]
        [('x', 'x', 'x'), ('x', 'y', 'y'), ('y', 'x', 'y'), ('y', 'y', 'x')]
        >>> [tuple(cases[position].values()) for position in cover(cases, strength=1)]
        [('x', 'x', 'x'), ('y', 'y', 'y')]
    """
    combinations = [_combinations(case, strength) for case in cases]
    missing = set().union(*combinations)
    uses = collections.Counter[tuple[str, Hashable]]()
    left = set(range(len(cases)))

    def gain(position: int) -> tuple[int, int, int]:
        used = sum(uses[value] for value in cases[position].items()) if strength == 1 else 0
        return len(combinations[position] & missing), -used, -position

    while missing:
        position = max(left, key=gain)
        left.remove(position)
        missing -= combinations[position]
        uses.update(cases[position].items())
    return sorted(set(range(len(cases))) - left)


def _combinations(case: Mapping[str, Hashable], strength: int) -> set[tuple[tuple[str, Hashable], ...]]:
    return set(itertools.combinations(sorted(case.items()), min(strength, len(case))))
