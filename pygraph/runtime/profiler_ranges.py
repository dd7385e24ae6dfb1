"""The range of a call in torch's profiler, with the name of the function; `native/profiler_range.h` does the same."""

# Whether a profiler is active has no public name. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from typing import Any

import torch
from torch.autograd.profiler import record_function


def range_name(function: str) -> str:
    """The name of the ranges of a function's calls.

    >>> range_name("train")
    'pygraph: train'
    """
    return f"pygraph: {function}"


def opened(name: str) -> record_function | None:
    """A range that is open now, for `close`; None, which costs next to nothing, if no profiler is active."""
    enabled: Any = torch.autograd._profiler_enabled  # pyright: ignore
    return record_function(name).__enter__() if enabled() else None


def close(found: record_function | None) -> None:
    """Close a range, if there is one."""
    if found is not None:
        found.__exit__(None, None, None)
