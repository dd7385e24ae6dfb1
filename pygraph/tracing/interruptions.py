"""Signals that arrive while a function is traced or its graphs are recorded: their handlers run when that is done.

Python runs a handler between any two instructions of the main thread. In the middle of a trace it would see fake
tensors, have its operations recorded, and lose what it changes when the trace puts everything back; an exception of
it would go through torch's code where that can do nothing but end the process. So handlers wait. What would make them
wait long is undone, they run, and it is begun anew: a trace leaves nothing behind. Ctrl-C does not wait at all where
the user's code is running.
"""

from __future__ import annotations

# What the module signal is made of, without its enumerations: all signals are asked for at every trace.
import _signal  # pyright: ignore[reportMissingImports]
import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pygraph.tracing.user_frames import is_user_frame

T = TypeVar("T")

PATIENCE = 0.5
"""Seconds that handlers wait for a trace to end; four times as many whenever it has to begin anew."""

RECORDING = 5.0
"""Seconds that handlers wait for a recording of graphs, which is not begun anew."""

_signals: Any = _signal
_SIGNALS = tuple(map(int, signal.valid_signals()))

_current: _Waiting | None = None  # of the main thread, which alone runs handlers


class Interrupted(BaseException):
    """Unwinds a trace to its beginning, for handlers that have waited long enough."""


def uninterrupted(work: Callable[[], T], *, recording: bool = False) -> T:
    """Run ``work`` with handlers of signals put off until it is done.

    Args:
        work: A function that leaves nothing behind when it is interrupted; it may then run again.
        recording: Handlers run in the middle of it rather than have it run again, if it takes very long.

    Raises:
        BaseException: What a handler raises, when ``work`` is done or undone.
    """
    if _current is not None or threading.current_thread() is not threading.main_thread():
        return work()
    patience = RECORDING if recording else PATIENCE
    while True:
        waiting = _Waiting(patience, recording)
        result: Any = None
        error: BaseException | None = None
        try:
            waiting.begin()
            result = work()
        except BaseException as raised:
            error = raised
        try:
            waiting.end()
            if not waiting.unwound:
                if error is not None:
                    raise error
                return result
        finally:
            result = error = None  # which the traceback of what a handler raises would keep, with all that they hold
        patience *= 4


def check(frame: Any = None) -> None:
    """Let the current trace be interrupted here, where an error may be raised.

    Args:
        frame: What is running; where it is not the user's code, handlers wait on. None if it is code of ours.

    Raises:
        Interrupted: Handlers have waited long enough.
    """
    if _current is not None and _current.pending and (frame is None or _is_users(frame)):
        _current.check()


class _Waiting:
    """The handlers that wait for one piece of work.

    Args:
        patience: The number of seconds that they wait.
        recording: Whether handlers run in the middle of the work after that; see `uninterrupted`.

    Attributes:
        pending: Handlers whose signals have arrived.
        unwound: Whether the work has been interrupted, also if it went on all the same.
    """

    def __init__(self, patience: float, recording: bool) -> None:
        self._patience, self._recording = patience, recording
        self._handlers: dict[int, _Handler] = {}
        self._since = 0.0
        self._open, self._returns = True, False
        self._lock = _thread.allocate_lock()
        self._thread = threading.get_ident()
        self.pending: dict[int, _Handler] = {}
        self.unwound = False

    def begin(self) -> None:
        """Put off the handlers of all signals."""
        global _current
        _current = self
        for number in _SIGNALS:
            handler = _signals.getsignal(number)
            # asyncio's does nothing: its loop reads of the signal from a file.
            if not callable(handler) or getattr(handler, "__module__", "") == "asyncio.unix_events":
                continue
            waiting = _Handler(handler)
            with contextlib.suppress(ValueError):  # another interpreter of this process has the main thread
                _signals.signal(number, waiting)
                self._handlers[number] = waiting

    def end(self) -> None:
        """Put the handlers back, except where the work has set others, and run those that have waited."""
        global _current
        with self._lock:
            self._open = False
        raised: BaseException | None = None
        while self._handlers:
            try:
                for number, waiting in list(self._handlers.items()):
                    if _signals.getsignal(number) is waiting:
                        _signals.signal(number, waiting.handler)
                    del self._handlers[number]
            except BaseException as error:  # of a handler that is back, and must not keep others from it
                raised = error
        _current = None
        with contextlib.ExitStack() as stack:  # one that raises does not keep others from running
            if raised is not None:
                stack.callback(_raise, raised)
            for number, waiting in reversed(self.pending.items()):
                stack.callback(waiting.handler, number, sys._getframe())  # pyright: ignore[reportPrivateUsage]

    def arrived(self, number: int, handler: _Handler, frame: Any) -> None:
        """A signal's handler is to run, for the first time or because it has waited."""
        if not self.pending:
            self._since = time.monotonic()
        self.pending[number] = handler
        waited = time.monotonic() - self._since
        if self._recording:
            if waited >= self._patience:
                del self.pending[number]
                handler.handler(number, frame)
                return
        elif _is_users(frame):
            self.check()
        if not self._returns:  # nobody else looks again while the work sleeps, or waits for a lock
            self._returns = True
            _thread.start_new_thread(self._arrive_again, (max(self._patience - waited, 0.05), number))

    def _arrive_again(self, seconds: float, number: int) -> None:
        time.sleep(seconds)
        with self._lock:
            self._returns = False
            if self._open:
                signal.pthread_kill(self._thread, number)

    def check(self) -> None:
        """Interrupt the work if it is time."""
        if threading.get_ident() != self._thread or self._recording:
            return
        urgent = any(handler.handler is signal.default_int_handler for handler in self.pending.values())
        if urgent or time.monotonic() - self._since >= self._patience:
            self.unwound = True
            raise Interrupted


class _Handler:
    """A handler that waits.

    Attributes:
        handler: The user's handler.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        if _current is None:  # somebody has set this one again later
            self.handler(number, frame)
        else:
            _current.arrived(number, self, frame)


def _raise(error: BaseException) -> None:
    raise error


def _is_users(frame: Any) -> bool:
    """Whether user code is running, and not code of torch or pygraph that it has called."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _USED_BY_TORCH:
        frame = frame.f_back
    return is_user_frame(frame)


# Packages that torch uses for symbols.
_USED_BY_TORCH = frozenset({"sympy", "mpmath"})
