"""The choice among the cases of a product, and what a short run leaves out."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import cover

PRODUCT = [dict(zip("abcd", values, strict=True)) for values in itertools.product(range(5), range(4), range(3), "xy")]


def pairs(cases: list[dict[str, object]]) -> set[object]:
    return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), 2)}


def test_all_pairs_occur_in_few_cases() -> None:
    chosen = [PRODUCT[position] for position in cover(PRODUCT)]
    assert pairs(chosen) == pairs(PRODUCT)
    assert len(chosen) <= 24  # at least 20: the values of a and b
    assert len(PRODUCT) == 120


def test_pairs_that_occur_nowhere_are_not_wanted() -> None:
    cases = [case for case in PRODUCT if case["a"] != case["b"]]
    assert pairs([cases[position] for position in cover(cases)]) == pairs(cases)


def test_single_values_occur_in_fewer_cases() -> None:
    chosen = cover(PRODUCT, strength=1)
    assert len(chosen) == 5
    for name in "abcd":
        assert {PRODUCT[position][name] for position in chosen} == {case[name] for case in PRODUCT}


def test_values_are_taken_in_turn() -> None:
    cases = [{"a": a, "b": b} for a in range(9) for b in range(3)]
    chosen = [cases[position] for position in cover(cases, strength=1)]
    assert len(chosen) == 9
    assert all(sum(case["b"] == b for case in chosen) == 3 for b in range(3))


@pytest.mark.parametrize("strength", [1, 2])
def test_a_product_of_few_parameters_is_taken_whole(strength: int) -> None:
    cases = [{"a": a} for a in range(3)]
    assert cover(cases, strength) == [0, 1, 2]
    assert cover([{}], strength) == [0]
    assert cover([], strength) == []
