"""Code from texts, which has a source as that in files has: where a function is cut, it is read."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

_NUMBERS = itertools.count()


def execute(source: str, scope: dict[str, Any]) -> None:
    """Execute a text in a namespace; its lines are known to tracebacks."""
    file = f"<source {next(_NUMBERS)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)


def function_of(source: str) -> Callable[..., Any]:
    """The function ``fn`` that a text defines."""
    scope: dict[str, Any] = {}
    execute(source, scope)
    return scope["fn"]
