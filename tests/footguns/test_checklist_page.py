"""The page ``docs/footguns.md`` and the tests of NVIDIA's checklist have the same items."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "footguns.md"


def test_every_item_of_the_page_has_tests() -> None:
    items = re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    modules = ("asynchronous", "static_graph", "memory_and_host")
    text = "".join((FOLDER / f"test_checklist_{name}.py").read_text(encoding="utf-8") for name in modules)
    tests = re.split(r"^# ---- (.+?) -+$", text, flags=re.MULTILINE)
    assert tests[1::2] == items
    assert all(re.search(r"^def test_", test, re.MULTILINE) for test in tests[2::2])
