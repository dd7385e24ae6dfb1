"""Parts of the docs' site that are not pages of ``docs/``: a menu of the design records, and the files of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent


def on_config(config: Any) -> Any:
    """Add the design records to the menu, in their order."""
    records = [f"design/{path.name}" for path in sorted((ROOT / "docs/design").glob("*.md"))]
    design = next(entry["Design"] for entry in config.nav if "Design" in entry)
    design.append({"Records": records})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what benchmarks have written, which pages with results link to."""
    for path in sorted((ROOT / "benchmarks/results").rglob("*")):
        if path.is_file():
            name = path.relative_to(ROOT).as_posix()
            file = File.generated(config, name, abs_src_path=str(path))
            if path.suffix == ".md":
                file.inclusion = file.inclusion.NOT_IN_NAV
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to the files of results, which lie beside ``docs/`` in the checkout, to their copies in the site."""
    return markdown.replace("](../benchmarks/results/", "](benchmarks/results/")
