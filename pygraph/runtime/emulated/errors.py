"""Errors of Python's that cross C++ frames of the emulated device: a backward raises what its hook or kernel raised.

C++ asks the device guard, which is Python, for its type while an error unwinds the stack, and no Python code can
return while an error is pending. So the guard takes the error away, and the engine's entry raises it again.
"""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
import dis
import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from typing_extensions import override  # torch depends on it

from pygraph.runtime.emulated.device_lock import backward
from pygraph.runtime.emulated.dynamo import hide_from_dynamo

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger(__name__)
_TYPE: Any = torch._C._autograd.DeviceType.PrivateUse1  # pyright: ignore
_running: Final[list[object]] = []  # backwards in progress, of all threads
_taken: Final[collections.deque[BaseException]] = collections.deque(maxlen=8)


def _without_signals(function: F) -> F:
    """Prevent signal handlers from running when the function is entered: only frames that continue another skip them.

    The argument of RESUME says which those are (CPython 3.11 to 3.14): from 2 on, after ``yield from`` and ``await``.
    """
    code = function.__code__
    resume = next(at.offset for at in dis.get_instructions(code) if at.opname == "RESUME")
    changed = bytearray(code.co_code)
    changed[resume + 1] = 3
    function.__code__ = code.replace(co_code=bytes(changed))
    return function


class Guard(torch._C._acc.DeviceGuard):  # pyright: ignore  # torch 2.11 to 2.13
    """The device guard, which C++ asks when it enters and leaves the device, also while an error unwinds the stack."""

    _pending = property(id)  # runs no Python code; raises a SystemError if an error is pending

    @hide_from_dynamo
    @_without_signals
    def type_(self, kind: Any = _TYPE) -> Any:  # noqa: D102
        # Autograd asks in destructors and noexcept functions, where an error that leaves this one would end the
        # process: be it one that is pending, or one of a signal handler, which may run at a call, but not here.
        try:
            self._pending  # noqa: B018
        except SystemError as error:
            _take(error.__cause__ or error)
        return kind


def _take(error: BaseException) -> None:
    if _running:
        _taken.append(error)
    else:
        _log.warning("an error that torch will report as a SystemError: %s", repr(error))


class _Engine(torch._C._ImperativeEngine):  # pyright: ignore  # torch 2.11 to 2.13
    """The autograd engine, which raises the error that the guard has taken instead of a SystemError."""

    @override
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        _running.append(self)
        try:
            with backward():
                return super().run_backward(*args, **kwargs)
        except SystemError:
            if not _taken:
                raise
            error = _taken.pop()
        finally:
            _running.pop()
            if not _running:
                _taken.clear()
        raise error


def replace_engine() -> None:
    """Have every backward of the process go through `_Engine`."""
    torch.autograd.Variable._execution_engine = _Engine()  # pyright: ignore
