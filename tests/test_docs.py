"""The Python examples of README and docs, run on the emulated device."""

from __future__ import annotations

import argparse
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import pygraph
from pygraph.__main__ import build_parser

ROOT = Path(__file__).parents[1]
NO_RUN = "<!-- no-run -->"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(path: Path) -> list[tuple[int, str]]:
    """The line and text of every ``python`` block of a page, but those with ``<!-- no-run -->`` on the line before."""
    text = path.read_text(encoding="utf-8")
    blocks: list[tuple[int, str]] = []
    for match in BLOCK.finditer(text):
        before = text[: match.start()]
        if not before.rstrip("\n").endswith(NO_RUN):
            blocks.append((before.count("\n") + 1, match[1]))
    return blocks


def as_script(path: Path) -> list[str]:
    """The lines of a page with only its examples on them, each where it is in the page."""
    lines: list[str] = []
    for line, source in examples(path):
        lines += [""] * (line - len(lines)) + source.splitlines()
    return [f"{line}\n" for line in lines]


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if examples(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run as a file, as a reader saves them; the lines of tracebacks are the page's own."""
    monkeypatch.setenv("PYGRAPH_DEVICE", "emulated")
    script = tmp_path / f"{page.stem}.py"
    script.write_text("".join(as_script(page)), encoding="utf-8")
    if "from transformers import" in script.read_text(encoding="utf-8"):
        pytest.importorskip("transformers")
    runpy.run_path(str(script), run_name=f"examples_of_{page.stem}")


def test_readme_has_examples() -> None:
    assert examples(ROOT / "README.md")


def test_marked_blocks_are_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"text\n\n```python\na = 1\n```\n\n{NO_RUN}\n```python\nb = 2\n```\n\n```text\nc\n```\n")
    assert examples(page) == [(3, "a = 1\n")]


DOCS = ROOT / "docs"
USERS = [DOCS / name for name in ("README.md", "features.md", "results.md", "bench.md", "compared.md", "footguns.md")]
USERS += [
    page for part in ("tutorials", "how-to", "limits", "reference") for page in sorted((DOCS / part).glob("*.md"))
]
HASH_OR_ISSUE = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b|\bissues?[ /]#?\d|(?<![\w`])#\d")


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_for_users_have_no_commits_and_no_issues(page: Path) -> None:
    assert HASH_OR_ISSUE.findall(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", ["at bfb213d it was", "see issue 25", "issues/7", "fixed (#12)"])
def test_commits_and_issues_are_noticed(text: str) -> None:
    assert HASH_OR_ISSUE.search(text)


LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_from_outside_the_site_lead_somewhere(page: str) -> None:
    """Those of pages in ``docs/`` are checked when the site is built."""
    links = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_pages_that_sources_name_are_there() -> None:
    named = {
        (source.relative_to(ROOT), name)
        for folder in ("pygraph", "tests", "benchmarks")
        for source in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", source.read_text(encoding="utf-8"))
    }
    assert named
    assert [one for one in named if not (ROOT / one[1]).exists()] == []


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    described = {name.removeprefix("pygraph.") for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    assert set(pygraph.__all__) - described == {"PygraphError"}  # one of `pygraph.errors`
    assert all(hasattr(pygraph, name) for name in described if "." not in name)


def commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The commands and long options of a parser, but those of ``bench``, which has a page of its own."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield name
                if name != "bench":
                    yield from commands(inner)
        elif action.help != argparse.SUPPRESS:
            yield from (option for option in action.option_strings if option.startswith("--"))


def test_commands_and_variables_are_in_the_reference() -> None:
    page = (DOCS / "reference/command-line.md").read_text(encoding="utf-8")
    sources = "".join(source.read_text(encoding="utf-8") for source in (ROOT / "pygraph").rglob("*.py"))
    wanted = {*commands(build_parser()), *re.findall(r"[(\[]\"(PYGRAPH_[A-Z_]+)\"", sources)}
    assert "info" in wanted
    assert "PYGRAPH_DEVICE" in wanted
    assert [one for one in sorted(wanted) if not re.search(rf"`([\w ]+ )?{one}\b", page)] == []
