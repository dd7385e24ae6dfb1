"""Frames that users see in errors."""

from __future__ import annotations

import traceback
from types import TracebackType

import pytest

from pygraph.tracing.error_frames import entries_of, in_user_code, without_ours


def _fails() -> None:
    raise ValueError


def _without_lines() -> TracebackType:
    """A traceback as of a signal's handler that raises at an instruction that belongs to no line."""
    code = _fails.__code__
    count = len(code.co_code) // 2
    sizes = [8] * (count // 8) + ([count % 8] if count % 8 else [])
    _fails.__code__ = code.replace(co_linetable=bytes(0xF8 | (size - 1) for size in sizes))  # "no location"
    try:
        _fails()
    except ValueError as error:
        found = error.__traceback__
    finally:
        _fails.__code__ = code
    assert found is not None
    return found


@pytest.mark.parametrize("frames", [without_ours, in_user_code])
def test_an_entry_that_belongs_to_no_line_stays(frames: object) -> None:
    entry = _without_lines()
    assert entries_of(entry)[-1].tb_lineno is None
    assert callable(frames)
    kept = entries_of(frames(entry))
    assert [one.tb_frame.f_code.co_name for one in kept] == ["_without_lines", "_fails"]
    assert "_fails" in "".join(traceback.format_tb(kept[0]))
