"""Errors that arrive at the handlers of user code while a function is traced.

Some are raised by a trace alone: by what the function does with a number that is not known (`table[k]`, which hashes
it), or by what is no part of a graph. Where a function catches such an error, it does what it does not do in eager.
"""

# Functions here are of any type; Python's own hooks take any events.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

import mpmath  # pyright: ignore[reportMissingTypeStubs]  # which sympy needs
import sympy  # pyright: ignore[reportMissingTypeStubs]

from pygraph.guards.environment import Environment
from pygraph.ir.source_lines import is_in_library


class HandledErrors:
    """Notes errors that code of the user's may handle.

    Args:
        environment: What the function can reach, its code among it.

    Attributes:
        raised: The errors, each once.
    """

    def __init__(self, environment: Environment) -> None:
        self.raised: list[BaseException] = []
        self._environment = environment
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def noticed(self) -> Generator[None, None, None]:
        """Note them inside; not where a debugger has Python's hooks already."""
        with self._monitored() if hasattr(sys, "monitoring") else self._traced():
            yield

    def _note(self, error: Any) -> None:
        if len(self.raised) < _MOST and not any(error is one for one in self.raised):
            self.raised.append(error)

    @contextlib.contextmanager
    def _monitored(self) -> Generator[None, None, None]:
        """Python 3.12 on says which errors are handled, at no cost elsewhere."""
        monitoring: Any = sys.monitoring  # pyright: ignore[reportAttributeAccessIssue]
        tool = next((one for one in _TOOLS if monitoring.get_tool(one) is None), None)
        if tool is None:
            yield
            return
        event = monitoring.events.EXCEPTION_HANDLED

        def handled(code: types.CodeType, offset: int, error: BaseException) -> None:
            del offset
            is_of_torch = is_in_library(code.co_filename) or code.co_filename.startswith(_SYMBOLS)
            if threading.get_ident() == self._thread and not is_of_torch:
                self._note(error)

        monitoring.use_tool_id(tool, "pygraph")
        try:
            monitoring.register_callback(tool, event, handled)
            monitoring.set_events(tool, event)
            yield
        finally:
            monitoring.set_events(tool, monitoring.events.NO_EVENTS)
            monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    @contextlib.contextmanager
    def _traced(self) -> Generator[None, None, None]:
        """Python 3.11 says it of frames that one asks for, and tells each call: it is asked for code with handlers."""
        codes = {code for code in _codes(self._environment) if _has_handlers(code)}
        if not codes or sys.gettrace() is not None:
            yield
            return

        def in_frame(frame: types.FrameType, event: str, arg: Any) -> Callable[..., Any]:
            del frame
            if event == "exception":
                self._note(arg[1])
            return in_frame

        def called(frame: types.FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
            del event, arg
            if frame.f_code not in codes:
                return None
            frame.f_trace_lines = False
            return in_frame

        sys.settrace(called)
        try:
            yield
        finally:
            sys.settrace(None)


_SYMBOLS = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (sympy, mpmath))
"""Libraries by which torch computes with numbers that are not known."""

_MOST = 100
"""Errors of one trace that are kept, with their frames, until it ends."""

_TOOLS = (3, 4)
"""Numbers of Python's monitoring tools that are no debugger's, profiler's or optimizer's."""


def _codes(environment: Environment) -> Iterator[types.CodeType]:
    """The code of the user's functions, with that of functions inside of them."""
    functions = (one for one in environment.objects() if isinstance(one, types.FunctionType))
    pending = [one.__code__ for one in functions if not is_in_library(one.__code__.co_filename)]
    while pending:
        code = pending.pop()
        yield code
        pending += [one for one in code.co_consts if isinstance(one, types.CodeType)]


@functools.lru_cache(maxsize=4096)
def _has_handlers(code: types.CodeType) -> bool:
    """Whether code has an `except` or a `finally` for errors of a trace, or a `with` that suppresses them.

    >>> def fails():
    ...     try:
    ...         return 1 / 0
    ...     except (ZeroDivisionError, TypeError):
    ...         return 0
    >>> _has_handlers(fails.__code__), _has_handlers(_codes.__code__)
    (True, False)
    """
    if "suppress" in code.co_names:
        return True
    operations = [(one.opname, one.argval) for one in dis.get_instructions(code)]
    names = [name for name, _ in operations]
    caught = [operations[at - 1][1] for at, name in enumerate(names) if name == "CHECK_EXC_MATCH"]
    # Of several `except` clauses each has a check, and what catches all errors, or none, has none.
    handlers = names.count("PUSH_EXC_INFO") - names.count("WITH_EXCEPT_START")
    return handlers > len(caught) or any(name not in _HARMLESS for name in caught)


_HARMLESS = frozenset(
    {"KeyError", "IndexError", "ImportError", "ModuleNotFoundError", "StopIteration", "ZeroDivisionError", "OSError",
     "FileNotFoundError", "KeyboardInterrupt", "AssertionError"}
)  # fmt: skip
"""Errors that no trace raises where eager raises none."""
