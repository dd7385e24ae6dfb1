"""The clock, files and processes: a trace in which the function asks them ends, and the call runs as it is.

For the time of a trace, a proxy is stored wherever the function can find such a call by name. It lets through what
others than the function ask: torch and pygraph, the standard library, as when it logs, other threads.
"""

# Calls take and give values of any type.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Generator
from typing import Any

from pygraph.guards.system_calls import CLOCK_METHODS, PATH_METHODS, name_of
from pygraph.ir.source_lines import PACKAGES_FOLDER, is_in_library

Refuse = Callable[[str], None]
"""Ends the trace for a call of this name, if the traced function is running."""


class SystemCall:
    """A proxy of a function that asks the system, or of a class of dates.

    Args:
        original: The function or class.
        refuse: Called where user code is about to ask.
    """

    __slots__ = ("_original", "_refuse")

    def __init__(self, original: Any, refuse: Refuse) -> None:
        self._original, self._refuse = original, refuse

    @property
    def __class__(self) -> Any:
        return type(self._original)

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise TypeError("the class of a function cannot be set")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, unless user code of the traced function does."""
        if not isinstance(self._original, type) and asks_itself(sys._getframe(1)):
            self._refuse(name_of(self._original))
        return self._original(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in CLOCK_METHODS and isinstance(self._original, type) and asks_itself(sys._getframe(1)):
            self._refuse(f"{name_of(self._original)}.{name}")
        return getattr(self._original, name)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._original)

    def __subclasscheck__(self, cls: type) -> bool:
        return issubclass(cls, self._original)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._original,)

    def __hash__(self) -> int:
        return hash(self._original)

    def __eq__(self, other: object) -> bool:
        return other is self or self._original == original_of(other)

    def __repr__(self) -> str:
        return repr(self._original)


def original_of(value: object) -> Any:
    """The function or class of a proxy; any other value itself."""
    return object.__getattribute__(value, "_original") if type(value) is SystemCall else value


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
            refuse(f"pathlib.{original.__qualname__}")
        return original(self, *args, **kwargs)

    return method


def asks_itself(frame: Any) -> bool:
    """Whether a frame is of code whose values depend on what it asks: no library's that caches, locks or logs."""
    name = frame.f_code.co_filename
    return not is_in_library(name) and not name.startswith(_APART)


# Packages that show progress or log, and those that torch compiles with.
_NAMES = ("tqdm", "rich", "loguru", "filelock", "sympy", "mpmath", "jinja2")
_APART = tuple(f"{PACKAGES_FOLDER}{name}{os.sep}" for name in _NAMES)
