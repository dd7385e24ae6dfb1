"""Running operations that are written down with the dtypes that they have."""

# Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch


def is_autocast_on() -> bool:
    """Whether operations on any device are cast now."""
    return any(map(torch.is_autocast_enabled, autocast_kinds()))


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Have operations in the dtypes that they are given: a trace has all casts, and would get others on top."""
    return _switched_off() if is_autocast_on() else contextlib.nullcontext()


@contextlib.contextmanager
def _switched_off() -> Generator[None, None, None]:
    with contextlib.ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, autocast_kinds()):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def autocast_kinds() -> tuple[str, ...]:
    """The types of devices that have it."""
    return "cpu", "cuda", torch._C._get_privateuse1_backend_name()
