"""Selections in words: what runs, and what is said of a way that was measured faster and does not run."""

from __future__ import annotations

import pytest

from pygraph.ir.selections import Candidate, Compared, Selection, margin

PATCH, COPY, LAUNCH = Candidate("patch"), Candidate("copy"), Candidate("launch")


def selection(patch: float, copy: float, *, runs: int = 7, provisional: str | None = None) -> Selection:
    compared = tuple(Compared(one, us, us, us, runs) for one, us in ((PATCH, patch), (COPY, copy)))
    return Selection(PATCH, "nothing was faster by more than noise", compared, provisional=provisional)


@pytest.mark.parametrize(
    ("patch", "copy", "remark"),
    [
        (3.4, 3.0, "copy was measured 0.4 µs faster, within the margin of 1.0 µs"),
        (600.0, 596.0, "copy was measured 4.0 µs faster, within the margin of 6.0 µs"),
        (600.0, 590.0, "copy was measured 10.0 µs faster, but single runs differ too much to prove it"),
        (30.0, 28.5, "copy was measured 1.5 µs faster, but single runs differ too much to prove it"),
    ],
)
def test_a_faster_way_that_does_not_run_is_explained(patch: float, copy: float, remark: str) -> None:
    found = selection(patch, copy)
    assert found.remarks() == [remark]
    assert remark in str(found)
    assert remark in found.sentences()


@pytest.mark.parametrize(("patch", "copy"), [(3.0, 3.4), (3.0, 3.0), (3.04, 3.0)])
def test_no_word_where_the_chosen_way_is_the_fastest_as_shown(patch: float, copy: float) -> None:
    assert selection(patch, copy).remarks() == []


def test_provisional_and_estimated() -> None:
    (remark,) = selection(30.0, 20.0, provisional="the clock changed").remarks()
    assert remark == "copy was measured 10.0 µs faster, but that is not certain"
    assert str(selection(30.0, 20.0, provisional="the clock changed")).endswith(
        "to be measured again, as the clock changed"
    )
    (remark,) = selection(3.4, 3.0, runs=0).remarks()
    assert remark.startswith("copy was estimated 0.4 µs faster")


def test_selections_without_times() -> None:
    assert Selection(LAUNCH, "there was no memory").remarks() == []
    assert str(Selection(LAUNCH, "there was no memory")) == "runs by launch: there was no memory"


def test_the_order_of_the_text() -> None:
    found = Selection(
        PATCH, "it was the fastest", selection(3.0, 5.0).compared, (1.9, 2.1), 0.984, None, "2026-11-28T05:00:00Z"
    )
    assert str(found) == (
        "runs by patch: it was the fastest; patch 3.0 µs (host 3.0, device 3.0), copy 5.0 µs (host 5.0, device 5.0); "
        "the next best takes +1.9 to +2.1 µs more (98.4% sure); measured 2026-11-28T05:00:00Z"
    )


def test_the_margin_is_a_share_of_long_times() -> None:
    assert margin(50.0) == 1.0
    assert margin(1000.0) == 10.0
