"""The Python examples of README and docs, run on the emulated device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if examples(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page share one namespace, in order; tracebacks show the page's own lines."""
    monkeypatch.setenv("PYGRAPH_DEVICE", "emulated")
    namespace = {"__name__": f"examples_of_{page.stem}"}
    for line, source in examples(page):
        exec(compile("\n" * line + source, str(page), "exec"), namespace)


def test_readme_has_examples() -> None:
    assert examples(ROOT / "README.md")


def test_marked_blocks_are_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"text\n\n```python\na = 1\n```\n\n{NO_RUN}\n```python\nb = 2\n```\n\n```text\nc\n```\n")
    assert examples(page) == [(3, "a = 1\n")]
