"""A line on the terminal that says what is compiled, and how far that is, once it takes longer than a few seconds.

For example::

    ⠹ compiling step: kernels 2 of 2 0:00:11

It is shown where standard error is a terminal, and is gone when the compilation is done. ``PYGRAPH_PROGRESS=0`` turns
it off. Calls that compile nothing do not come here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_DELAY = 3.0
"""Seconds of a compilation before anything is shown."""


@dataclasses.dataclass(eq=False)
class Compilation:
    """One compilation, as its line describes it.

    Attributes:
        name: What is compiled.
        began: The time of its begin, by the clock of the line.
        cancel: Keeps it from being shown later.
        phase: What is done now.
        done: How many of a phase's parts have begun.
        parts: How many there are; 0 if that is not known.
        is_long: Whether it has taken so long that it is shown.
    """

    name: str
    began: float
    cancel: Callable[[], object] = lambda: None
    phase: str = ""
    done: int = 0
    parts: int = 0
    is_long: bool = False

    def __str__(self) -> str:
        counted = f" {min(max(self.done, 1), self.parts)} of {self.parts}" if self.parts else ""
        return f"compiling {self.name}" + (f": {self.phase}{counted}" if self.phase else "")


def _after(seconds: float, run: Callable[[], None]) -> Callable[[], object]:
    timer = threading.Timer(seconds, run)
    timer.daemon = True
    timer.start()
    return timer.cancel


class ProgressLine:
    """The line of all compilations of a process: that of the one that began first, of those that take long.

    Args:
        stream: The terminal.
        clock: Seconds.
        after: Calls a function in so many seconds; returns a function that keeps it from doing so.
        refreshes: Whether a thread draws the line again and again, so that its time goes on.
    """

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        after: Callable[[float, Callable[[], None]], Callable[[], object]] = _after,
        *,
        refreshes: bool = True,
    ) -> None:
        import rich.progress  # noqa: F401  # pyright: ignore[reportUnusedImport]  # not later, in the middle of a trace

        self._stream, self._clock, self._after, self._refreshes = stream, clock, after, refreshes
        self._lock = threading.Lock()
        self._running: list[Compilation] = []
        self._shown: Progress | None = None

    def begin(self, name: str) -> Compilation:
        """Note that something is compiled."""
        one = Compilation(name, self._clock())
        with self._lock:
            self._running.append(one)
        one.cancel = self._after(_DELAY, lambda: self._show(one))
        return one

    def _show(self, one: Compilation) -> None:
        with self._lock:
            one.is_long = one in self._running
            self._draw()

    def update(self, one: Compilation, **changes: Any) -> None:
        """Note how far it is."""
        with self._lock:
            for name, value in changes.items():
                setattr(one, name, value)
            self._draw()

    def end(self, one: Compilation) -> None:
        """Note that it is done."""
        one.cancel()
        with self._lock:
            self._running.remove(one)
            self._draw()

    def _draw(self) -> None:
        """Draw the line, or erase it."""
        first = next((one for one in self._running if one.is_long), None)
        with contextlib.suppress(Exception):  # a terminal that has gone away ends no compilation
            if first is None:
                shown, self._shown = self._shown, None
                if shown is not None:
                    shown.stop()
                return
            shown = self._shown or self._new()
            (task,) = shown.tasks
            task.start_time = first.began
            shown.update(task.id, description=str(first), refresh=True)
            if self._shown is None:
                self._shown = shown
                shown.start()

    def _new(self) -> Progress:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        made = Progress(
            *columns, console=Console(file=self._stream), get_time=self._clock, auto_refresh=self._refreshes,
            refresh_per_second=4, transient=True, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        made.add_task("", total=None)
        return made


# ---- the line of this process ----------------------------------------------------------------------------------


class _Here(threading.local):
    """The compilation that this thread is in."""

    line: ProgressLine | None = None
    compilation: Compilation | None = None


_here = _Here()
_LINES: dict[int, ProgressLine] = {}
"""The line of each terminal that standard error has been, by the identity of the stream, which the line keeps."""


@contextlib.contextmanager
def compiling(name: str) -> Generator[None, None, None]:
    """A block that compiles something; one inside of another is part of that."""
    stream = sys.stderr
    if _here.compilation is not None or not _is_wanted(stream):
        yield
        return
    line = _LINES.get(id(stream)) or _LINES.setdefault(id(stream), ProgressLine(stream))
    _here.line, _here.compilation = line, line.begin(name)
    try:
        yield
    finally:
        line.end(_here.compilation)
        _here.line = _here.compilation = None


def phase(name: str, parts: int = 0) -> None:
    """Say what the compilation of this thread does now, and how many parts that has if it is known."""
    if _here.line is not None and _here.compilation is not None:
        _here.line.update(_here.compilation, phase=name, done=0, parts=parts)


def next_part() -> None:
    """Say that the next part of this phase begins."""
    if _here.line is not None and _here.compilation is not None:
        _here.line.update(_here.compilation, done=_here.compilation.done + 1)


def _is_wanted(stream: TextIO | None) -> bool:
    read = os.environ.get
    if read("PYGRAPH_PROGRESS") == "0" or read("TERM") in ("dumb", "unknown"):
        return False
    if read("LOCAL_RANK", "0") != "0":  # processes of torchrun have one terminal
        return False
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # it is no stream, or closed
        return False


def _forget() -> None:
    """Leave the lines of the parent process, whose threads a forked one has not."""
    _LINES.clear()
    _here.line = _here.compilation = None


os.register_at_fork(after_in_child=_forget)
