"""Remedies for fallbacks: advice to the user."""

from __future__ import annotations

from pygraph.ir.descriptors import Fallback
from pygraph.ir.effects import ON_CPU

KEEP_SHAPE = "Keep the shape: torch.where or a mask instead of fewer rows, or padding, as by bounds={…}."

STATE = "Pass it as an argument, or keep it where the function does not read it."

_REMEDIES = (
    ("on the host, to return it", "Return the tensor, and read it after the call."),
    (
        "needs a value on the host",
        "Decide on the device (torch.where, index_copy_), or pass the value; distributions take validate_args=False.",
    ),
    (
        "by value",
        "Take an operation that has a tensor there (index_select, index_copy_), or pass a number of the host.",
    ),
    ("where an argument lies depends on data", "Index by a tensor: index_select, gather or index_copy_."),
    (" changes at every call", STATE),
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
    if fallback.what.endswith("higher_order.cond"):
        return "Compute what both branches give, and choose by torch.where."
    if fallback.what == "aten._linalg_check_errors.default":
        return "Take one that leaves the check of its result to you: torch.linalg.inv_ex, solve_ex or cholesky_ex."
    return next((remedy for part, remedy in _REMEDIES if part in fallback.reason), None)


def remedy_of_values(*, are_numbers: bool) -> str:
    """The remedy for calls that are compiled for every other value of an argument.

    Args:
        are_numbers: Whether all such values are numbers.
    """
    if not are_numbers:
        return "Pass the same value, or object, at every call, or let there be few."
    return (
        "Pass it as a tensor if the function only computes with it; for an index, pass a tensor to index_select or "
        "index_copy_; a size, or the length of a loop, should take few values."
    )
