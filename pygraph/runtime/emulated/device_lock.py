"""The lock of the emulated device: one thread at a time works on it, and none beside a recording in progress."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

lock = threading.RLock()
"""Held by every operation, and by a recording from its begin to its end: other threads wait until it is over."""

_in_backward: int = 0  # backwards that the thread with the lock waits for; only that thread changes it


def held() -> contextlib.AbstractContextManager[object]:
    """A block that has the lock; but a thread of autograd's does not wait for a thread that has it and waits for that
    thread.
    """
    return _held_by_autograd() if isinstance(threading.current_thread(), threading._DummyThread) else lock  # pyright: ignore


@contextlib.contextmanager
def _held_by_autograd() -> Generator[None, None, None]:
    # It may work for several backwards at once: what it does for the others then comes in between as well.
    while not (taken := lock.acquire(timeout=0.01)) and not _in_backward:
        pass
    try:
        yield
    finally:
        if taken:
            lock.release()


@contextlib.contextmanager
def backward() -> Generator[None, None, None]:
    """A backward, for which autograd's threads work while this one waits, maybe with the device's lock."""
    global _in_backward
    if not lock._is_owned():  # pyright: ignore  # CPython 3.11 to 3.14
        yield
        return
    _in_backward += 1
    try:
        yield
    finally:
        _in_backward -= 1
