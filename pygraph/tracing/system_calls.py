"""The clock, files, processes, streams, what is printed: a trace in which the function asks them ends, before it has.

For the time of a trace, a proxy is stored wherever the function can find such a call by name. It lets through what
others than the function ask: torch and pygraph, the standard library, as when it logs, other threads.
"""

# Calls take and give values of any type.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Generator
from typing import Any

from pygraph.guards.system_calls import PATH_METHODS, asks, method_asks, name_of
from pygraph.ir.source_lines import PACKAGES_FOLDER, is_in_library, is_in_standard_library
from pygraph.tracing.function_proxies import FunctionProxy
from pygraph.tracing.patches import replaced

Refuse = Callable[[str, str], None]
"""Ends the trace, if the traced function is running: for what it does, in words, and what to do instead."""

_CALL_OUTSIDE = "Call it outside of the function, and pass what it gives as an argument."


class SystemCall(FunctionProxy):
    """A proxy of a function that asks the system, or of a class that can.

    Args:
        original: The function, class, stream or event.
        refuse: Called where user code is about to ask.
    """

    __slots__ = ("_refuse",)

    def __init__(self, original: Any, refuse: Refuse) -> None:
        super().__init__(original)
        self._refuse = refuse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, unless user code of the traced function does."""
        if asks(self._original, args, kwargs) and asks_itself(sys._getframe(1)):
            self._refuse(f"it calls {name_of(self._original)}()", _CALL_OUTSIDE)
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if method_asks(self._original, name) and asks_itself(sys._getframe(1)):
            self._refuse(f"it calls {name_of(self._original)}.{name}()", _CALL_OUTSIDE)
        return getattr(self._original, name)

    def __enter__(self) -> Any:
        """Enter a stream, unless user code of the traced function does."""
        if asks_itself(sys._getframe(1)):
            self._refuse(f"it enters a {name_of(self._original)}", _CALL_OUTSIDE)
        return self._original.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        return self._original.__exit__(*raised)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._original)

    def __subclasscheck__(self, cls: type) -> bool:
        return issubclass(cls, self._original)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._original,)


@contextlib.contextmanager
def watched_paths(refuse: Refuse) -> Generator[None, None, None]:
    """Have methods of `pathlib.Path` refuse what user code asks, by which it finds them without a name of their own."""
    with contextlib.ExitStack() as undo:
        for name in PATH_METHODS:
            own, original = name in vars(pathlib.Path), getattr(pathlib.Path, name)
            setattr(pathlib.Path, name, _method(original, refuse))
            if own:
                undo.callback(setattr, pathlib.Path, name, original)
            else:
                undo.callback(delattr, pathlib.Path, name)
        yield


def _method(original: Any, refuse: Refuse) -> Any:
    @functools.wraps(original)
    def method(self: pathlib.Path, *args: Any, **kwargs: Any) -> Any:
        if asks_itself(sys._getframe(1)):
            refuse(f"it calls pathlib.{original.__qualname__}()", _CALL_OUTSIDE)
        return original(self, *args, **kwargs)

    return method


@contextlib.contextmanager
def watched_variables(refuse: Refuse) -> Generator[None, None, None]:
    """Have variables of the environment refuse that user code sets them."""

    def setting(original: Any) -> Any:
        @functools.wraps(original)
        def method(self: Any, *args: Any) -> Any:
            if asks_itself(sys._getframe(1)):
                refuse("it sets a variable of the environment", "Set it before the call.")
            return original(self, *args)

        return method

    with replaced(type(os.environ), "__setitem__", setting), replaced(type(os.environ), "__delitem__", setting):
        yield


@contextlib.contextmanager
def watched_outputs(refuse: Refuse) -> Generator[None, None, None]:
    """Have standard output, standard error and loggers refuse what user code prints and logs.

    A warning is shown: Python has noted by then that it is, and would not show it again.
    """

    def handling(original: Any) -> Any:
        @functools.wraps(original)
        def callHandlers(self: logging.Logger, record: logging.LogRecord) -> None:
            if _prints(sys._getframe(1)):
                refuse("it logs", "Log after the call.")
            original(self, record)

        return callHandlers

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(logging.Logger, "callHandlers", handling))
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is not None:
                stack.enter_context(replaced(sys, name, functools.partial(_Stream, refuse)))
        yield


class _Stream:
    """A stream of text that refuses what user code prints."""

    def __init__(self, refuse: Refuse, original: Any) -> None:
        self._original, self._refuse = original, refuse

    def write(self, text: str) -> Any:
        if _prints(sys._getframe(1)):
            self._refuse("it prints", "Print after the call.")
        return self._original.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __iter__(self) -> Any:
        return iter(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _prints(frame: Any) -> bool:
    """Whether user code prints or logs here, by itself or by what prints for it."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == warnings.__file__:
            return False
        if name == _TQDM and frame.f_code.co_name == "write":  # a message, and no bar
            return True
        if not is_in_standard_library(name) and not name.startswith(_PRINTERS):
            break
        frame = frame.f_back
    return frame is not None and asks_itself(frame)


def asks_itself(frame: Any) -> bool:
    """Whether a frame is of code whose values depend on what it asks: no library's that caches, locks or logs."""
    name = frame.f_code.co_filename
    return not is_in_library(name) and not name.startswith(_APART)


# Packages that show progress or log, and those that torch compiles with.
_PRINTERS = tuple(f"{PACKAGES_FOLDER}{name}{os.sep}" for name in ("rich", "loguru"))
_TQDM = os.path.join(PACKAGES_FOLDER, "tqdm", "std.py")
_OTHERS = ("tqdm", "filelock", "sympy", "mpmath", "jinja2")
_APART = (*_PRINTERS, *(f"{PACKAGES_FOLDER}{name}{os.sep}" for name in _OTHERS))
