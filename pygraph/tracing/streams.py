"""Streams and events of CUDA: a trace in which the function uses one ends, before it has.

A graph has its work on the stream of its call. What a function asks a stream or an event for happens on the host, so
that a replay would not do it again: an event that others wait for would not be recorded, a wait would be left out.
"""

# Methods take and give values of any type.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch

from pygraph.tracing.user_frames import is_user_frame

_USE_OUTSIDE = "Use streams and events before and after the call."

# Checked with torch 2.11 and 2.13.
_METHODS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.cuda.Stream, ("wait_event", "wait_stream", "record_event", "query", "synchronize")),
    (torch.cuda.Event, ("record", "wait", "query", "elapsed_time", "synchronize")),
    (torch.cuda.StreamContext, ("__enter__",)),
)


@contextlib.contextmanager
def watched_streams(refuse: Callable[[str, str], None]) -> Generator[None, None, None]:
    """Have the methods of CUDA's streams and events refuse what user code calls.

    Args:
        refuse: Ends the trace, if the traced function is running: for what it does, in words, and what to do instead.
    """
    with contextlib.ExitStack() as undo:
        for cls, names in _METHODS:
            for name in names:
                original = vars(cls)[name]
                setattr(cls, name, _watched(cls, original, refuse))
                undo.callback(setattr, cls, name, original)
        yield


def _watched(cls: Any, original: Any, refuse: Callable[[str, str], None]) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_user_frame(sys._getframe(1)) and not _changes_nothing(self):
            what = "torch.cuda.stream" if cls is torch.cuda.StreamContext else f"torch.cuda.{original.__qualname__}"
            refuse(f"it calls {what}()", _USE_OUTSIDE)
        return original(self, *args, **kwargs)

    return method


def _changes_nothing(value: Any) -> bool:
    """Whether it is the context of the stream that is the current one already, or of none."""
    if type(value) is not torch.cuda.StreamContext:
        return False
    return value.stream is None or value.stream == torch.cuda.current_stream()
