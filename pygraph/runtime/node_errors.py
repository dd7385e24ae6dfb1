"""Errors of operations that fail where they run, as on values that they do not take: with the user's line in a note."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch import fx

from pygraph.ir.effects import fails_by_data
from pygraph.ir.source_lines import text_of


class _Line(str):
    """A note that names a line."""

    __slots__ = ()


def note_line(error: Exception, node: fx.Node, name: str) -> None:
    """Note the user's line that a failed operation comes from, with its code.

    Args:
        error: What the operation has raised.
        node: The operation's node.
        name: What errors call the function.
    """
    line: str | None = node.meta.get("source")
    if line is None or has_line(error):
        return
    code = text_of(line)
    error.add_note(_Line(f"From {line}, in {name}(…)" + (f": {code}" if code else "")))


def note_failure(error: Exception, node: fx.Node) -> None:
    """Note of an error whether the operation of a node has raised it by its data, and nothing else went wrong."""
    if fails_by_data(node):
        error._pygraph_failed = True  # pyright: ignore[reportAttributeAccessIssue]


def is_failure(error: Exception) -> bool:
    """Whether an operation has raised an error by its data."""
    return getattr(error, "_pygraph_failed", False)


@contextlib.contextmanager
def not_without_effects() -> Generator[None, None, None]:
    """Have an error of what runs here be no failure of an operation alone: other things may have been done before."""
    try:
        yield
    except Exception as error:
        if is_failure(error):
            error._pygraph_failed = False  # pyright: ignore[reportAttributeAccessIssue]
        raise


def has_line(error: BaseException) -> bool:
    """Whether the line of a failed operation is noted."""
    return any(isinstance(note, _Line) for note in getattr(error, "__notes__", ()))


def node_of(error: Exception, function: Callable[..., Any], operations: Mapping[int, fx.Node]) -> fx.Node | None:
    """The node whose operation has failed in a function of nodes; None if something else has.

    Args:
        error: The error.
        function: The function.
        operations: Its nodes, by the lines of its code that run their operations.
    """
    lines = (line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code is function.__code__)
    return operations.get(next(lines, 0))
