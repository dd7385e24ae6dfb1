"""Which way a call is expected to go."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraph.calls.expected_paths import ExpectedPaths

A, B, C = ("True",), ("False",), ("False", "3")


def wrong(paths: Sequence[tuple[str, ...]]) -> list[int]:
    """The calls that go another way than expected."""
    known, found = ExpectedPaths(most=4), list[int]()
    for index, path in enumerate(paths):
        if known.expected() != path:
            found.append(index)
        known.note(path)
    return found


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([A, A, A, A], [0]),
        ([A, B] * 4, [0, 1, 2]),
        ([A, A, A, B, A, A, A, A, B, A], [0, 3, 8]),
        ([A, A, B, B, B, B], [0, 2, 3]),
        ([A, B, C] * 3, [0, 1, 2, 3]),
    ],
    ids=["one way", "turns", "exceptions", "another way from now on", "three turns"],
)
def test_what_comes_next(paths: Sequence[tuple[str, ...]], expected: list[int]) -> None:
    assert wrong(paths) == expected


@given(st.lists(st.sampled_from([A, B, C, (), ("False", "4"), ("True", "True")]), max_size=30))
def test_only_known_ways_are_expected(paths: list[tuple[str, ...]]) -> None:
    known = ExpectedPaths(most=3)
    for index, path in enumerate(paths):
        assert known.expected() in [*paths[:index], None]
        begin = path[:1]
        found = known.beginning_with(begin)
        assert found is None or found[: len(begin)] == begin
        assert known.beginning_with((), set(paths)) is None
        known.note(path)
        assert known.beginning_with(path) == path
