"""State of the current thread: the attributes of a ``threading.local``, the value of a context variable."""

# Values are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from typing import Any

from pygraph.guards.contents import Contents


def items_in_thread(value: threading.local | contextvars.ContextVar[Any]) -> dict[str, Any]:
    """The attributes of a thread-local in the current thread, or the value of a context variable as ``get()``."""
    if isinstance(value, threading.local):
        return threading.local.__getattribute__(value, "__dict__")
    try:
        return {"get()": value.get()}  # its default, too
    except LookupError:
        return {}


def contents_in_thread(value: threading.local | contextvars.ContextVar[Any]) -> Contents:
    """`items_in_thread` as `Contents`; leaving the context restores the value of a context variable."""

    def write(items: Sequence[Any]) -> None:
        if isinstance(value, threading.local):
            state = items_in_thread(value)
            state.clear()
            state.update(zip(items[::2], items[1::2], strict=True))

    return Contents(lambda: [part for item in items_in_thread(value).items() for part in item], write)
