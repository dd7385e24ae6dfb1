"""Remedies for fallbacks: advice to the user."""

from __future__ import annotations

from pygraph.ir.descriptors import Fallback
from pygraph.ir.effects import ON_CPU

KEEP_SHAPE = "Keep the shape: torch.where or a mask instead of fewer rows, or padding."

_REMEDIES = (
    ("needs a value on the host", "Decide on the device (torch.where, torch.cond, index_copy_), or pass the value."),
    ("by value", "Keep it a tensor on the device, or read it before the call and pass it."),
    ("shape of its result depends on data", KEEP_SHAPE),
    ("synchronises with the host", "Let it run before or after the call, or replace it by operations of fixed shapes."),
    ("its result is on the", "Leave it on the device, and copy it after the call."),
    ("kinds of calls seldom come again", "Pad to a few shapes, or pass a position as a tensor."),
    (ON_CPU, "Move the module, and what it is called with, to the device."),
)
"""Parts of reasons, and what to do."""


def remedy_of(fallback: Fallback) -> str | None:
    """Find the remedy for a fallback; None if its reason says all.

    >>> remedy_of(Fallback("aten.nonzero.default", "it synchronises with the host"))
    'Let it run before or after the call, or replace it by operations of fixed shapes.'
    """
    return next((remedy for part, remedy in _REMEDIES if part in fallback.reason), None)
