"""Hashes of a trace's numbers that a user's sets and dictionaries need, until nothing of the trace is left."""

# Symbols are torch's. Checked with torch 2.11 and 2.13.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch

from pygraph.tracing.patches import replaced


def give_hash(number: Any, value: int) -> int:
    """Have a number hash as what it is."""
    found = number.pygraph_hash = hash(value)
    return found


@contextlib.contextmanager
def hashes_given() -> Generator[None, None, None]:
    """Have numbers that were given a hash keep it; torch's have none."""
    with replaced(torch.SymInt, "__hash__", _given):
        yield


def _given(own: Callable[[Any], int]) -> Callable[[Any], int]:
    def given(number: Any) -> int:
        known = vars(number).get("pygraph_hash")
        return own(number) if known is None else known

    return given
