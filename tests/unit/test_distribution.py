"""What the distribution says of itself, and remedies that install it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import pygraph

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_who_may_use_it(project: dict[str, Any]) -> None:
    assert project["license-files"] == ["LICENSE"]
    assert (ROOT / "LICENSE").read_text().startswith("BSD 3-Clause License")
    assert project["license"] == "BSD-3-Clause"


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [pygraph.__version__]
    assert "arXiv:2503.19779" in text


def test_remedies_install_this_distribution(project: dict[str, Any]) -> None:
    """Not the one that has the package's name on the index; a checkout installs itself."""
    remedies = [
        remedy
        for path in (ROOT / "pygraph").rglob("*.py")
        for remedy in re.findall(r"pip install ([^`\n]*)", path.read_text())
    ]
    assert remedies
    for remedy in remedies:
        assert remedy.startswith((f"'{project['name']}[", "-e '.["))
    extras = {extra for remedy in remedies for extra in re.findall(r"\[(\w+)\]", remedy)}
    assert extras <= set(project["optional-dependencies"])


def test_files_that_are_no_modules_are_part_of_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["pygraph"]
    there = [
        path for path in (ROOT / "pygraph").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".so")
    ]
    assert {path.suffix for path in there} >= {".cpp", ".h", ".html", ".css"}
    matched = {path for pattern in data for path in (ROOT / "pygraph").glob(pattern)}
    assert sorted(set(there) - matched) == []
