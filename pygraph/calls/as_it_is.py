"""A call that is to run as it is, and why."""

from __future__ import annotations

import dataclasses

from pygraph.calls.entries import Entry
from pygraph.calls.new_kinds import Waiting
from pygraph.ir.descriptors import Fallback
from pygraph.ir.program import Program


@dataclasses.dataclass(frozen=True)
class AsItIs:
    """A call that is to run as it is.

    Attributes:
        note: Why; None if that is no fallback.
        entry: The entry that says so, if it is kept and counts its calls.
        program: A Program that is evaluated instead.
        waiting: Its kind, if that waits for being compiled.
    """

    note: Fallback | None
    entry: Entry | None = None
    program: Program | None = None
    waiting: Waiting | None = None
