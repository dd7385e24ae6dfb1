"""No garbage collection for a while: finalizers must not run operations in the middle of a trace or a recording.

What they do would be written down with the rest and repeated at every replay; and tensors that are freed while a CUDA
graph is captured call into the driver at the wrong time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Generator

_lock = threading.RLock()  # a signal handler may come here while the same thread is here
_depth = 0
_was_on = False


class _Here(threading.local):
    depth = 0


_here = _Here()
"""Of the current thread: in how many blocks of `no_collection` it is."""


@contextlib.contextmanager
def no_collection() -> Generator[None, None, None]:
    """Keep the garbage collector from starting by itself; nests, also across threads.

    Example:
        >>> import gc
        >>> with no_collection():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    global _depth, _was_on
    with _lock:
        _depth += 1
        _here.depth += 1
        if _depth == 1:
            _was_on = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _depth == 1 and _was_on:
                gc.enable()
            _depth -= 1
            _here.depth -= 1


def collect(generation: int = 2) -> bool:
    """Collect garbage up to a generation, in a block of `no_collection`, unless it is inside of another one, or another
    thread is; whether it was done.
    """
    with _lock:
        if _depth > 1:
            return False
        gc.collect(generation)
        return True


def _after_fork() -> None:
    """Have the garbage collector start again in a child process, where other threads and their blocks do not exist."""
    global _depth
    _lock._at_fork_reinit()  # pyright: ignore  # as CPython does for its own locks, 3.11 to 3.14
    if _depth and not _here.depth and _was_on:
        gc.enable()
    _depth = _here.depth


os.register_at_fork(after_in_child=_after_fork)
