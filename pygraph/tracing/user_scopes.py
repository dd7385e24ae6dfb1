"""The scopes of a function that is traced: ranges of torch's profiler and of NVTX that are open now.

``record_function`` is an operation, which `OperationsMode` sees. NVTX is called in Python, by functions of one object
of ``torch.cuda.nvtx``, which is replaced for the time of a trace.
"""

# The operations of record_function, and the object of torch.cuda.nvtx, are private. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch

from pygraph.tracing.proxy_trace import tracing_here

_profiler = torch.ops.profiler
_BEGIN = (_profiler._record_function_enter_new.default, _profiler._record_function_enter.default)
_END = (_profiler._record_function_exit.default, _profiler._record_function_exit._RecordFunction)

_open: list[str] = []  # of the trace under way; traces come one at a time


@contextlib.contextmanager
def scopes_noticed() -> Generator[None, None, None]:
    """A block in which a function is traced, in whose scopes there are no others; nests."""
    before = _open[:]
    _open.clear()
    try:
        yield
    finally:
        _open[:] = before


def open_scopes() -> tuple[str, ...]:
    """The scopes that are open, from the outermost to the innermost."""
    return tuple(_open)


def note_operation(func: Any, args: tuple[Any, ...]) -> None:
    """Note that an operation opens or closes a scope, if it does."""
    if func in _BEGIN:
        _open.append(str(args[0]))
    elif func in _END:
        _close()


def _close() -> None:
    if _open:
        _open.pop()


class NvtxHere:
    """The functions of NVTX that ``torch.cuda.nvtx`` calls: those of before, noted in threads that are in a trace."""

    pygraph_ended = False

    def __init__(self, before: Any) -> None:
        self._before = before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._before, name)
        noted = {"rangePushA": _opening, "rangePop": _closing}.get(name)
        return found if noted is None or not tracing_here() else noted(found)


def _opening(push: Callable[[str], Any]) -> Callable[[str], Any]:
    def opening(text: str) -> Any:
        depth = push(text)
        _open.append(text)
        return depth

    return opening


def _closing(pop: Callable[[], Any]) -> Callable[[], Any]:
    def closing() -> Any:
        depth = pop()
        _close()
        return depth

    return closing
