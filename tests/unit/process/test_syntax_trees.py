"""Source text that several threads parse at once."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Generator

import pytest

from pygraph.process.syntax_trees import syntax_tree
from tests.unit.runtime.test_threads import run_threads


class InACycle:
    """What only the garbage collector deletes, by code of Python, in which threads take turns."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(100):
            pass


@contextlib.contextmanager
def _switching() -> Generator[None, None, None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_threads_that_parse_at_once() -> None:
    with open(ast.__file__) as file:
        source = file.read()
    trees: list[ast.Module] = []

    def parse() -> None:
        for _ in range(10):
            for _ in range(50):
                InACycle()
            trees.append(syntax_tree(source))

    with _switching():
        run_threads(*[parse] * 4)
    expected = ast.dump(ast.parse(source))
    assert len(trees) == 40
    assert all(ast.dump(tree) == expected for tree in trees[::8])


def test_source_that_is_none() -> None:
    with pytest.raises(SyntaxError):
        syntax_tree("def")
