"""How much memory the host, or the container, can still give."""

from __future__ import annotations

from pathlib import Path

import pytest

from pygraph.process import host_memory
from pygraph.process.host_memory import has_room


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a host with 800 KiB, of which 500 are available, and of a container without a limit."""
    (tmp_path / "meminfo").write_text(
        "MemTotal:  800 kB\nMemFree:  10 kB\nMemAvailable:  500 kB\nHugePages_Total:  0\n"
    )
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{300 * 1024}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 * 1024}\nfile 7\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CONTAINER", tmp_path)
    monkeypatch.setattr(host_memory, "_FRESH", -1.0)
    return tmp_path


def most() -> int:
    """The most KiB for which there is room."""
    return max((size for size in range(0, 1000, 10) if has_room(size * 1024)), default=-1)


def test_an_eighth_stays_free(system: Path) -> None:
    assert most() == 400


def test_the_limit_of_a_container(system: Path) -> None:
    (system / "memory.max").write_text(f"{400 * 1024}\n")
    assert most() == 400 - (300 - 100) - 400 // 8
    (system / "memory.max").write_text(f"{210 * 1024}\n")
    assert most() == -1


@pytest.mark.parametrize("missing", ["memory.stat", "memory.current", "memory.max"])
def test_a_system_that_does_not_say(system: Path, missing: str) -> None:
    (system / "memory.max").write_text(f"{210 * 1024}\n")
    (system / missing).unlink()
    assert most() == 400
    (system / "meminfo").unlink()
    assert has_room(2**60)


def test_what_was_asked_for_counts_until_the_system_says_again(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert most() == 400
    monkeypatch.setattr(host_memory, "_FRESH", 3600.0)
    monkeypatch.setattr(host_memory, "_room", host_memory._Room())
    (system / "meminfo").rename(system / "moved")
    assert has_room(2**60), "which nothing says"
    (system / "moved").rename(system / "meminfo")
    monkeypatch.setattr(host_memory, "_room", host_memory._Room())
    assert has_room(300 * 1024)
    assert not has_room(101 * 1024)
    assert has_room(100 * 1024)
    assert not has_room(1024)
    monkeypatch.setattr(host_memory, "_FRESH", -1.0)
    assert has_room(400 * 1024)


def test_this_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_room", host_memory._Room())
    assert not has_room(2**60)
