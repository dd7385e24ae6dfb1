"""The extension is there wherever it can be built: the other tests of it are skipped without it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from pygraph.process import extension, extension_source


@pytest.mark.skipif(
    extension._compiler() is None or not extension.enabled(), reason="no C++ compiler, or PYGRAPH_NATIVE=0"
)
def test_it_is_built_where_there_is_a_compiler() -> None:
    assert extension.start(wait=True) is not None, extension.reason()


def test_it_is_built_again_when_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(extension_source.FOLDER, tmp_path / "native")
    monkeypatch.setattr(extension_source, "FOLDER", tmp_path / "native")
    targets = {extension._target()}
    assert extension._target() in targets, "nothing changed"
    sources = [path for path in (tmp_path / "native").iterdir() if path.suffix in (".cpp", ".h")]
    for source in sources:
        source.write_text(source.read_text() + "\n")
        targets.add(extension._target())
    assert len(targets) == len(sources) + 1


def test_every_header_is_included() -> None:
    text = "".join(path.read_text() for path in extension_source.FOLDER.iterdir() if path.suffix in (".cpp", ".h"))
    included = set(re.findall(r'#include "(.+)"', text))
    assert included == {path.name for path in extension_source.FOLDER.glob("*.h")}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the source, as a wheel has it, with a library."""
    folder = tmp_path / "native"
    shutil.copytree(extension_source.FOLDER, folder)
    monkeypatch.setattr(extension_source, "FOLDER", folder)
    library = folder / extension_source.file_name()
    library.write_bytes(b"a library")
    extension_source.note_of(library).write_text(extension_source.identity(), encoding="utf-8")
    return folder


def test_the_library_of_a_wheel_is_taken_where_it_fits(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = source / extension_source.file_name()
    assert extension._target() == library
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "2.12.7")
        assert extension._target() != library
    assert extension._target() == library
    (source / "plan.h").write_text("// another plan")
    assert extension._target() != library


def test_a_wheel_without_its_library_or_note_is_as_one_that_never_had_it(source: Path) -> None:
    library = source / extension_source.file_name()
    note = extension_source.note_of(library)
    text = note.read_text()
    note.unlink()
    assert extension_source.prebuilt() is None
    note.write_text(text)
    assert extension_source.prebuilt() == library
    library.unlink()
    assert extension_source.prebuilt() is None
