"""Progress of a run: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Reporter:
    """Bars of the rows that run now and of all rows; without a terminal, a line for what has happened.

    Args:
        console: Where to.
        rows: How many rows there are.
    """

    def __init__(self, console: Console, rows: int) -> None:
        self._console, self._start = console, time.monotonic()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bars = Progress(*columns, console=console, transient=True)
            self._all = self._bars.add_task("rows", total=rows)

    def __enter__(self) -> Reporter:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def line(self, text: str) -> None:
        """Say something that stays."""
        seconds = time.monotonic() - self._start
        self._console.print(f"{seconds:6.0f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def update(self, row: str, doing: str, done: int, of: int) -> None:
        """Show what a row does now, and how far it is."""
        if self._bars is None:
            return
        if row not in self._tasks:
            self._tasks[row] = self._bars.add_task(row, total=1)
        self._bars.update(self._tasks[row], description=f"{row}: {doing}", completed=done, total=of)

    def finish(self, row: str, text: str, counts: bool = True) -> None:
        """Say how a row ended, and whether it counts as done."""
        self.line(f"{row}: {text}")
        if self._bars is not None:
            if row in self._tasks:
                self._bars.remove_task(self._tasks.pop(row))
            if counts:
                self._bars.advance(self._all)
