"""Autocast, switched off: a trace has the casts as operations, and would get others on top."""

# Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch


def is_autocast_on() -> bool:
    """Whether autocast is enabled for any device."""
    return any(map(torch.is_autocast_enabled, autocast_kinds()))


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """A context in which no operation is cast; it costs nothing where autocast is off."""
    return _switched_off() if is_autocast_on() else contextlib.nullcontext()


@contextlib.contextmanager
def _switched_off() -> Generator[None, None, None]:
    with contextlib.ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, autocast_kinds()):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def autocast_kinds() -> tuple[str, ...]:
    """The types of devices that have autocast."""
    return "cpu", "cuda", torch._C._get_privateuse1_backend_name()
