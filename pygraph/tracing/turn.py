"""Traces come one at a time: what they replace in torch, and what tells their objects from others, is the process's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from pygraph.tracing import interruptions

_LOCK = threading.RLock()


@contextlib.contextmanager
def turn() -> Generator[None, None, None]:
    """Wait for the traces of other threads, so that handlers of signals do not wait with this one; nests."""
    while not _LOCK.acquire(timeout=0.1):
        interruptions.check()
    try:
        yield
    finally:
        _LOCK.release()
