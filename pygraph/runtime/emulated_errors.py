"""Errors of Python's that cross C++ frames of the emulated device: a backward raises what its hook or kernel raised.

C++ asks the device guard, which is Python, for its type while an error unwinds the stack, and no Python code can
return while an error is pending. So the guard takes the error away, and the engine's entry raises it in its stead.
"""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import collections
import ctypes
import logging
from typing import Any, Final

import torch
from typing_extensions import override  # torch depends on it

from pygraph.runtime.emulated_dynamo import hide_from_dynamo

_log = logging.getLogger(__name__)
_TYPE: Any = torch._C._autograd.DeviceType.PrivateUse1  # pyright: ignore
_running: Final[list[object]] = []  # backwards in progress, of all threads
_taken: Final[collections.deque[BaseException]] = collections.deque(maxlen=8)


class Guard(torch._C._acc.DeviceGuard):  # pyright: ignore  # torch 2.11 to 2.13
    """What C++ asks when it enters and leaves the device; also while an error of Python's unwinds the stack."""

    @hide_from_dynamo
    def type_(self, check: Any = ctypes.pythonapi.Py_IsInitialized, kind: Any = _TYPE) -> Any:  # noqa: D102
        # Autograd asks in a destructor, where an error that leaves this function would end the process. The call
        # raises what is pending, and reads nothing but locals before it does.
        try:
            check()
        except BaseException as error:
            _take(error)
        return kind


def _take(error: BaseException) -> None:
    if _running:
        _taken.append(error)
    else:
        _log.warning("an error that torch will report as a SystemError: %s", repr(error))


class _Engine(torch._C._ImperativeEngine):  # pyright: ignore  # torch 2.11 to 2.13
    """The autograd engine, which raises the error that the guard has taken in the place of a SystemError."""

    @override
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        _running.append(self)
        try:
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
    """Let every backward of the process go through `_Engine`."""
    torch.autograd.Variable._execution_engine = _Engine()  # pyright: ignore
