"""Words of the library: how docstrings open, and which words names may not have.

A docstring opens with the noun or verb of its subject, and names use the words of torch, CUDA and compilers. `OPENINGS`
and `NAMES` say how many exceptions each package may still have; these numbers only get smaller. Print what there is now
with ``python -m tests.unit.test_words``.
"""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pygraph

ROOT = Path(pygraph.__file__).parent

Finding = tuple[int, str]
"""A line and what is wrong there."""

OPENINGS: dict[str, int] = {}
"""Docstrings per package that may open with a word that refers to something else."""

NAMES: dict[str, int] = {}
"""Names per package that may have a word of `LEXICON`."""

REFERRING = re.compile(r"(What|The same|Those|That of|It|Whether that)\b(?!')")
"""Openings that cannot be read without the neighbours of a docstring, or that hide its subject in a clause."""

LEXICON = (
    "apart", "beside", "given up", "kept", "let go", "marks", "passed", "place", "places", "stand in", "stand ins",
    "told", "twin", "twins",
)  # fmt: skip
"""Private words. The common ones: saved or cached, recorded, Python path, refused, released, argument, location,
staging buffer or fake tensor or proxy."""

USUAL = ("in place", "out of place")
"""torch's own phrases with a word of the lexicon."""


def openings(tree: ast.Module) -> Iterator[Finding]:
    """Docstrings of the module, its classes, functions and attributes that open with a referring word."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str) and REFERRING.match(text.lstrip()):
                    yield statement.lineno, text.strip().split("\n")[0]


def names(tree: ast.Module) -> Iterator[Finding]:
    """Classes, functions and parameters whose names have a private word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and is_private(node.name):
            yield node.lineno, node.name
        if isinstance(node, ast.arg) and is_private(node.arg):
            yield node.lineno, node.arg


def is_private(name: str) -> bool:
    """Whether a name has a word of the lexicon."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", name).lower().split()
    text = f" {' '.join(words)} "
    for phrase in USUAL:
        text = text.replace(f" {phrase} ", "  ")
    return any(f" {word} " in text for word in LEXICON)


def findings(find: Callable[[ast.Module], Iterator[Finding]]) -> dict[str, list[str]]:
    """All findings by package; those of modules that lie in no package by ``pygraph``."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        package = relative.parts[0] if len(relative.parts) > 1 else "pygraph"
        lines = list(find(ast.parse(path.read_text(encoding="utf-8"))))
        if find is names and is_private(path.stem):
            lines.insert(0, (1, f"the module {path.stem}"))
        found[package] += [f"pygraph/{relative}:{line}: {text}" for line, text in lines]
    return {package: lines for package, lines in found.items() if lines}


@pytest.mark.parametrize(("find", "allowed"), [(openings, OPENINGS), (names, NAMES)], ids=["openings", "names"])
def test_words(find: Callable[[ast.Module], Iterator[Finding]], allowed: dict[str, int]) -> None:
    more = {package: lines for package, lines in findings(find).items() if len(lines) > allowed.get(package, 0)}
    counts = {package: f"{len(lines)}, allowed {allowed.get(package, 0)}" for package, lines in more.items()}
    assert not more, f"{counts}\n" + "\n".join(line for lines in more.values() for line in lines)


def test_openings_are_found() -> None:
    source = '''
"""What a module is about."""
limit = 3
"""Those that are left."""
class Table:
    """It holds rows."""
    def rows(self):
        """The same as a list."""
    def columns(self):
        """Whether that is so."""
        return "What no docstring is"
    def size(self):
        """Rows that are in the table. It is small."""
    def item(self):
        """Items of the table."""
'''
    assert [line for line, _ in openings(ast.parse(source))] == [2, 4, 6, 8, 10]


def test_names_are_found() -> None:
    source = """
class Kept: ...
def write_in_place(passed, *, twins=(), **told): ...
async def given_up(placeholder, *stand_ins): ...
unpacked = lambda place: place
"""
    found = [name for _, name in names(ast.parse(source))]
    assert sorted(found) == sorted(["Kept", "passed", "twins", "told", "given_up", "stand_ins", "place"])
    assert all(map(is_private, ("kept", "TwinTensor", "_given_up", "places")))
    assert not any(map(is_private, ("placeholder", "is_in_place", "Replaced", "passes", "bypassed")))


if __name__ == "__main__":
    for title, find in (("OPENINGS", openings), ("NAMES", names)):
        print(f"{title} = {{")
        for package, lines in findings(find).items():
            print(f'    "{package}": {len(lines)},')
        print("}")
