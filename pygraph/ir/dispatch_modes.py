"""Leaving the dispatch modes of this thread for a while, without touching those of another one.

torch keeps the modes of its "pre-dispatch" tracers (``torch.export``) in one list for the whole process, and its own
way out of all modes empties that list too: a thread that exports a program meanwhile loses its modes.
"""

# torch has no public names for this; checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode


@contextlib.contextmanager
def no_dispatch_modes() -> Generator[None, None, None]:
    """A block in which no dispatch mode of this thread is active.

    >>> from torch.utils._python_dispatch import TorchDispatchMode
    >>> class NothingRuns(TorchDispatchMode):
    ...     def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    ...         raise RuntimeError("an operation")
    >>> with NothingRuns(), no_dispatch_modes():
    ...     torch.ones(2) + 1
    tensor([2., 2.])
    """
    if torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.PreDispatch):  # the list is of this thread
        with _disable_current_modes():
            yield
        return
    modes: list[Any] = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
