"""Comparisons in a trace as conditions that calls check: where the outcome is the same, the trace's guard holds."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import pytest
import sympy
from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, IntTrueDiv, Mod, PythonMod, ToFloat

from pygraph.guards.locations import Item
from pygraph.tracing.number_conditions import comparison_in, condition_of, guard_text

COUNT, OTHER = sympy.Symbol("s0", integer=True), sympy.Symbol("s1", integer=True)
RATE = sympy.Symbol("zf2", real=True)
NAMES = {COUNT: "n0", OTHER: "n1", RATE: "n2"}
PATHS = ["args[0]", "args[1]['n1']", "args[2][0]"]


def condition(guard: Any) -> Any:
    text = guard_text(guard, NAMES)
    if text is None:
        return None
    return condition_of(comparison_in(text, PATHS), lambda path: ("args", path.removeprefix("args")))


def outcome(guard: Any, count: Any, other: Any, rate: Any) -> Any:
    return condition(guard).outcome((count, {"n1": other}, [rate]), {})


SIDES = {
    "count": (COUNT, lambda n, m: n),
    "sum": (COUNT + 2 * OTHER - 3, lambda n, m: n + 2 * m - 3),
    "rest": (Mod(COUNT, 4), lambda n, m: n % 4),
    "rest as in Python": (PythonMod(COUNT - OTHER, 3), lambda n, m: (n - m) % 3),
    "floor": (FloorDiv(COUNT, 3), lambda n, m: n // 3),
    "ratio": (IntTrueDiv(COUNT + 1, COUNT + 10), lambda n, m: (n + 1) / (n + 10)),
    "part of ten": (FloatTrueDiv(ToFloat(COUNT), sympy.Float(10.0)), lambda n, m: n / 10.0),
}
RELATIONS = {
    operator.lt: sympy.Lt, operator.le: sympy.Le, operator.gt: sympy.Gt, operator.ge: sympy.Ge,
    operator.eq: sympy.Eq, operator.ne: sympy.Ne,
}  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("relation", RELATIONS)
def test_one_outcome_is_one_decision(side: str, relation: Any) -> None:
    left, compute = SIDES[side]
    for right in (sympy.Integer(1), sympy.Integer(2)):
        guard = RELATIONS[relation](left, right)
        if guard == sympy.Eq(COUNT, right):
            continue  # the number itself
        decisions: dict[Any, set[bool]] = {}
        for count, other in itertools.product(range(-9, 30), (-2, 0, 5)):
            if side == "ratio" and count == -10:
                continue
            found = outcome(guard, count, other, 0.0)
            decisions.setdefault(found, set()).add(relation(compute(count, other), int(right)))
        assert all(len(decided) == 1 for decided in decisions.values()), decisions
        assert len(decisions) <= 2


def test_no_number_has_an_outcome_of_its_own() -> None:
    for guard in (sympy.Ge(RATE, 0.0), sympy.Lt(RATE, 0.0), sympy.Gt(0.0, RATE)):
        outcomes = [outcome(guard, 0, 0, rate) for rate in (1.0, -1.0, math.nan)]
        assert len({str(found) for found in outcomes}) == 3
    assert outcome(sympy.Ne(RATE, 0.0), 0, 0, 0.0) is False
    assert outcome(sympy.Ne(RATE, 0.0), 0, 0, 0.1) is True


@pytest.mark.parametrize(
    "guard",
    [
        sympy.Gt(RATE * 2.0 + 1.0, 3.0),  # sums of floats may be added in another order
        sympy.Lt(FloatTrueDiv(RATE, sympy.Float(3.0)), 1.0),
        sympy.Eq(RATE, sympy.Float(0.3)),  # the number itself was asked for
        sympy.Eq(COUNT, sympy.Integer(1)),
        sympy.Lt(sympy.Symbol("u0", integer=True), 3),  # which a tensor holds
        sympy.Or(sympy.Lt(RATE, 1.0), sympy.Gt(COUNT, 4)),
        sympy.Lt(COUNT, sympy.oo),
    ],
)
def test_what_is_not_exact_is_no_condition(guard: Any) -> None:
    assert condition(guard) is None


def test_several_comparisons_of_integers_are_one() -> None:
    for guard, decide in (
        (sympy.And(sympy.Ge(COUNT, 0), sympy.Le(COUNT, 16)), lambda n: 0 <= n <= 16),
        (sympy.Or(sympy.Lt(COUNT, 1), sympy.Gt(COUNT, 4)), lambda n: n < 1 or n > 4),
    ):
        assert all(outcome(guard, count, 0, 0.0) is decide(count) for count in range(-9, 30))


def test_conditions_of_locations() -> None:
    state: dict[str, Any] = {"count": 3}
    text = guard_text(sympy.Eq(Mod(COUNT, 4), 3), NAMES)
    assert text is not None
    comparison = comparison_in(text, PATHS)
    first, second = (condition_of(comparison, lambda path: (Item(state, "count"), "")) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.is_same(second)
    assert first.outcome((), {}) is True
    state["count"] = 4
    assert first.outcome((), {}) is False
    for value in (None, "text", [1]):
        state["count"] = value
        assert first.outcome((), {}) in ("undefined", False)
    del state["count"]
    assert first.outcome((), {}) == "undefined"
