"""Errors in calls that are to be graphs: of a user's own code as they are, with a note that says where from."""

from __future__ import annotations

from typing import NoReturn

import torch

from pygraph.errors import FallbackError, TraceError
from pygraph.runtime.node_errors import has_line, is_failure


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


def raise_refused(error: TraceError, name: str) -> NoReturn:
    """Raise that a call has no trace, by one error with one cause: what torch, or the function, has raised.

    Args:
        error: The error of the trace.
        name: What errors call the function.

    Raises:
        FallbackError: Always, but for an error of the function's own.
    """
    if error.raised is not None:
        raise_own(error.raised, name)
    text = str(error).replace(f"trace({name})(…)", f"{name}(…)", 1)
    cause = error.__cause__
    while isinstance(cause, TraceError):  # it says the same
        cause = cause.__cause__
    raise FallbackError(text) from cause


def reason_of_failure(error: Exception, *, strict: bool) -> str:
    """Why a call runs as it is whose graphs cannot be recorded; an error that is no reason for it is raised.

    Args:
        error: What recording has raised. An operation that fails does so in eager too, where all that comes before it
            is done, as it is not yet here. One by its data is an answer to a question that the call has not asked.
        strict: Whether the function is not to run as it is.
    """
    if isinstance(error, torch.OutOfMemoryError):  # recording and proving needs copies of arguments and results
        return "there is not enough memory to record its graphs and to prove them"
    if strict or is_failure(error) or not has_line(error):
        raise error
    return f"an operation fails: {error}"
