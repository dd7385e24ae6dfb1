"""Syntax trees of source text, in a process whose other threads may read source as well."""

from __future__ import annotations

import ast

_TRIES = 20


def syntax_tree(source: str) -> ast.Module:
    """Parse ``source``.

    CPython 3.11 and 3.12 count how deep they are in a tree in a variable that threads share. A tree is all right where
    another thread has changed that count, but the parser says that it is not (python/cpython#106905).

    Raises:
        SyntaxError: The source is none of Python's.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(source)
        except SystemError:
            continue
    return ast.parse(source)
