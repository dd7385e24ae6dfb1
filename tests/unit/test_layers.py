"""The plan of the package: which package may import which, without circles, and how large modules and functions are.

Lazy imports and those for types alone count like all others.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "pygraph"

LAYERS = (
    {"errors", "native"},
    {"ir", "process"},
    {"guards", "lowering", "report"},
    {"tracing", "runtime", "transforms"},
    {"calls"},
    {"autograd"},
    {"api"},
    {"interop"},
    {"__init__"},
    {"demo", "installation"},
    {"__main__"},
)
"""Packages and modules of their own, the lowest first; each imports those of lower layers only."""

MOST_LINES = 450
MOST_LINES_OF_A_FUNCTION = 60
"""Without its docstring."""


def _modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("pygraph", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


@functools.cache
def _tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def imported(name: str) -> set[str]:
    """The modules of ours that a module imports, wherever it does."""
    found: set[str] = set()
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import, which this test does not read"
            base = node.module or ""
            found |= {full if (full := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
    return {one for one in found if one in MODULES and one != name}


def package(name: str) -> str:
    """The package of a module, or the module itself if it is in none."""
    return name.split(".")[1] if "." in name else "__init__"


FLOOR = {one: floor for floor, layer in enumerate(LAYERS) for one in layer}


def test_every_package_has_a_layer() -> None:
    assert {package(name) for name in MODULES} == set(FLOOR)


def test_there_are_few_floors() -> None:
    floors: dict[str, int] = {}

    def floor(one: str) -> int:
        if one not in floors:
            below = {package(other) for name in MODULES if package(name) == one for other in imported(name)}
            floors[one] = 1 + max(map(floor, below - {one}), default=0)
        return floors[one]

    libraries = [one for one in FLOOR if one not in ("__init__", "__main__", "demo", "installation")]
    assert max(map(floor, libraries)) <= 9


def test_modules_import_lower_layers_only() -> None:
    pairs = [(name, other) for name in MODULES for other in imported(name) if package(other) != package(name)]
    assert [pair for pair in pairs if FLOOR[package(pair[1])] >= FLOOR[package(pair[0])]] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " imports ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in sorted(imported(name)):
                visit(other, (*above, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_the_runtime_imports_no_transform_and_programs_import_nothing_above() -> None:
    reached = {package(other) for name in MODULES if package(name) == "runtime" for other in imported(name)}
    assert not reached & {"transforms", "tracing"}
    reached = {package(other) for name in MODULES if package(name) == "ir" for other in imported(name)}
    assert reached <= {"ir", "errors"}


def test_modules_are_short() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def _functions(name: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(_tree(name)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, 1 + (node.end_lineno or 0) - body[0].lineno if body else 0


def test_functions_are_short() -> None:
    lines = {f"{name}.{one}": count for name in MODULES for one, count in _functions(name)}
    assert {name: count for name, count in lines.items() if count > MOST_LINES_OF_A_FUNCTION} == {}
