"""The extension is there wherever it can be built: the other tests of it are skipped without it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from pygraph.process import extension


@pytest.mark.skipif(
    extension._compiler() is None or not extension.enabled(), reason="no C++ compiler, or PYGRAPH_NATIVE=0"
)
def test_it_is_built_where_there_is_a_compiler() -> None:
    assert extension.start(wait=True) is not None, extension.reason()


def test_it_is_built_again_when_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(extension._FOLDER, tmp_path / "native")
    monkeypatch.setattr(extension, "_FOLDER", tmp_path / "native")
    targets = {extension._target()}
    assert extension._target() in targets, "nothing changed"
    sources = [path for path in (tmp_path / "native").iterdir() if path.suffix in (".cpp", ".h")]
    for source in sources:
        source.write_text(source.read_text() + "\n")
        targets.add(extension._target())
    assert len(targets) == len(sources) + 1


def test_every_header_is_included() -> None:
    text = "".join(path.read_text() for path in extension._FOLDER.iterdir() if path.suffix in (".cpp", ".h"))
    included = set(re.findall(r'#include "(.+)"', text))
    assert included == {path.name for path in extension._FOLDER.glob("*.h")}
