"""The lock of traces: they come one at a time, as their patches of torch and their frozen objects are the process's."""

from __future__ import annotations

import contextlib
import os
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


def _after_fork() -> None:
    """Free the lock in a child process, if a thread has it that does not exist there."""
    if not _LOCK._is_owned():  # pyright: ignore  # CPython 3.11 to 3.14
        _LOCK._at_fork_reinit()  # pyright: ignore  # as CPython does for its own locks


os.register_at_fork(after_in_child=_after_fork)
