"""Errors of a user's own code in calls that are to be graphs: raised as they are, with a note that says where from."""

from __future__ import annotations

from typing import NoReturn


def raise_own(raised: Exception, name: str) -> NoReturn:
    """Raise an error that a function's own code has raised while it was traced, as its call in eager would.

    Args:
        raised: The error. What it was raised from stays what it was.
        name: What errors call the function.
    """
    note = f"Raised while pygraph traced {name}(…), with strict=True."
    if note not in getattr(raised, "__notes__", ()):  # it may be raised again and again
        raised.add_note(note)
    context = raised.__context__
    try:
        raise raised
    finally:
        raised.__context__ = context  # not the error of the trace
