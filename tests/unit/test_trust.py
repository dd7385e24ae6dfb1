"""Files that are not loaded, as somebody else may have written them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pygraph.process import cache, trust
from pygraph.process.trust import distrust


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("text")
    return tmp_path / "folder" / "file"


def test_a_file_in_a_folder_of_ones_own(path: Path) -> None:
    assert distrust(path) is None
    assert distrust(path.parent / "not there yet" / "file") is None


@pytest.mark.parametrize("which", ["file", "folder"])
def test_everybody_can_write(path: Path, which: str) -> None:
    place = path if which == "file" else path.parent
    place.chmod(0o757)
    assert distrust(path) == f"everybody can write to {place}: `chmod o-w {place}`"


def test_a_folder_where_nobody_can_replace_what_others_have(path: Path) -> None:
    path.parent.chmod(0o1777)
    assert distrust(path) is None


def test_a_link_leads_to_where_everybody_can_write(path: Path, tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    (open_folder / "file").write_text("text")
    path.unlink()
    path.symlink_to(open_folder / "file")
    assert distrust(path) is None
    open_folder.chmod(0o777)
    assert str(distrust(path)).startswith(f"everybody can write to {open_folder}")


class Owned:
    """The status of a file with another owner, group or mode."""

    def __init__(self, found: os.stat_result, **other: int) -> None:
        self._found, self._other = found, other

    def __getattr__(self, name: str) -> Any:
        return self._other.get(name, getattr(self._found, name))


def owned(monkeypatch: pytest.MonkeyPatch, place: Path, **other: int) -> None:
    stat = Path.stat

    def changed(self: Path, **options: Any) -> Any:
        found = stat(self, **options)
        return Owned(found, **other) if self == place else found

    trust._trusted()  # pygraph's own folder as it is
    monkeypatch.setattr(Path, "stat", changed)


def test_files_of_somebody_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned(monkeypatch, path.parent, st_uid=54321)
    assert distrust(path) == f"{path.parent} belongs to user 54321"


def test_folders_that_pygraph_makes_are_the_user_s_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache.make_private(tmp_path / "a" / "b")
        cache.make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / place).stat().st_mode & 0o777 for place in ("a", "a/b")] == [0o700, 0o700]
    assert distrust(tmp_path / "a" / "b" / "file") is None
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        cache.make_private(tmp_path / "file" / "c")


@pytest.mark.parametrize("alone", [True, False])
def test_a_group_can_write(path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    owned(monkeypatch, path.parent, st_gid=54321)
    path.parent.chmod(0o775)
    monkeypatch.setattr(trust, "_is_alone", lambda group: alone)
    assert distrust(path) == (None if alone else f"group 54321 can write to {path.parent}: `chmod g-w {path.parent}`")
