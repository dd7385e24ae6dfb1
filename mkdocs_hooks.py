"""Parts of the docs' site that are not pages of ``docs/``: design records, files of results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
RESULTS = "benchmarks/results/"
NOT_SEARCHED = ("design/", RESULTS)
"""What the search leaves out: pages for developers, which would come before those for users."""
SEARCHED_LAST = ("conformance.md", "conformance-variants.md", "pointers.md", "how-it-works.md")


def on_config(config: Any) -> Any:
    """Add the design records to the menu, in their order."""
    records = [f"design/{path.name}" for path in sorted((ROOT / "docs/design").glob("*.md"))]
    design = next(entry["Design"] for entry in config.nav if "Design" in entry)
    design.append({"Records": records})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what benchmarks have written, which pages with results link to."""
    for path in sorted((ROOT / RESULTS).rglob("*")):
        if path.is_file():
            name = path.relative_to(ROOT).as_posix()
            file = File.generated(config, name, abs_src_path=str(path))
            if path.suffix == ".md":
                file.inclusion = file.inclusion.NOT_IN_NAV
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links between ``docs/`` and the files of results, which lie side by side in the checkout, to the site.

    The files of results are a folder of the site, below which the pages of ``docs/`` are.
    """
    name = page.file.src_uri
    if name.startswith(NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}
    elif name in SEARCHED_LAST:
        page.meta["search"] = {"boost": 0.2}
    if name.startswith(RESULTS):
        return markdown.replace("](../../docs/", "](../../")
    return re.sub(r"\]\(\.\./((?:\.\./)*benchmarks/results/)", r"](\1", markdown)


def on_post_build(config: Any) -> None:
    """Remove the sitemap, which without an address of the site has no entries."""
    if not config.site_url:
        for name in ("sitemap.xml", "sitemap.xml.gz"):
            (Path(config.site_dir) / name).unlink(missing_ok=True)
