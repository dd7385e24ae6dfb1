"""``python -m pygraph info`` and ``build``, and the process that builds the path in C++."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import pygraph
from pygraph import __version__
from pygraph.__main__ import main
from pygraph.process import builder, cache, extension

COMPILER = """#!/bin/sh
for made; do :; done
echo "$$" >> LOG
sleep SECONDS
RESULT
"""

LIBRARY = getattr(extension.start(wait=True), "__file__", None)

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch, pygraph
pygraph.jit(lambda x: x * 2 + 1)(torch.ones(2, device=pygraph.default_device()))
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Has calls of a compiler answered by a script, with an empty cache; returns the file of its calls."""

    def use(result: str | None = None, seconds: float = 0.0) -> Path:
        log, script = tmp_path / "log", tmp_path / "compiler"
        found = result or f'cp "{LIBRARY}" "$made"'
        script.write_text(COMPILER.replace("LOG", str(log)).replace("SECONDS", str(seconds)).replace("RESULT", found))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path / "cache"))
        return log

    return use


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.so"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)


needs_extension = pytest.mark.skipif(LIBRARY is None, reason=str(extension.reason()))


def _being_made(tmp_path: Path) -> list[str]:
    """Folders of libraries that are being made; some may be gone while they are looked for."""
    found = (name for _, folders, files in os.walk(tmp_path / "cache") for name in (*folders, *files))
    return [name for name in found if name.startswith("tmp")]


@needs_extension
def test_short_scripts_leave_one_library_that_one_compiler_has_made(
    tmp_path: Path, compiler: Callable[..., Path]
) -> None:
    log = compiler(seconds=4.0)
    scripts = [subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT) for _ in range(3)]
    assert [script.wait() for script in scripts] == [0, 0, 0]
    deadline = time.monotonic() + 60
    # The compiling process moves the library into its place, and removes its folder a moment later.
    while (not libraries(tmp_path) or _being_made(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(libraries(tmp_path)) == 1
    assert len(log.read_text().split()) == 1
    assert not _being_made(tmp_path)
    told = run("-m", "pygraph", "info").stdout.replace("\n", "")
    assert "in C++, by" in told


@needs_extension
def test_it_is_built_by_command(tmp_path: Path, compiler: Callable[..., Path]) -> None:
    log = compiler()
    assert "is ready, after" in run("-m", "pygraph", "build").stdout
    assert len(log.read_text().split()) == 1
    told = run("-m", "pygraph", "info", "--clear").stdout
    assert told.startswith("removed: ")
    assert "not built yet" in " ".join(told.split())
    assert libraries(tmp_path) == []


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had asked for the extension in this process yet."""
    monkeypatch.delenv("PYGRAPH_NATIVE", raising=False)
    for name in ("_module", "_reason", "_thread"):
        monkeypatch.setattr(extension, name, None)


def test_why_it_cannot_be_built(
    compiler: Callable[..., Path], unloaded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler("echo 'dispatch.cpp:1: fatal error: Python.h: No such file' >&2; exit 1")
    assert main(["build"]) == 2
    told = " ".join(capsys.readouterr().out.split())
    assert "calls are recognised in Python: the extension could not be built: dispatch.cpp:1: fatal error" in told
    assert extension.start() is None, "nothing is built again"


def test_no_library_of_others_is_loaded(tmp_path: Path, compiler: Callable[..., Path], unloaded: None) -> None:
    log = compiler()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert extension.start(wait=True) is None
    wanted = f"everybody can write to {tmp_path / 'cache'}: `chmod o-w {tmp_path / 'cache'}`"
    assert extension.reason() == f"the extension could not be built: {wanted}"
    assert not log.exists()
    extension._target().write_bytes(b"a library")
    extension._reason = None
    assert extension.start(wait=True) is None
    assert extension.reason() == f"the extension is not loaded: {wanted}"


def test_a_build_is_told_of(compiler: Callable[..., Path], unloaded: None) -> None:
    compiler("exit 1")
    assert extension.state().startswith("in Python: the extension is not built yet")
    extension._target().parent.mkdir(parents=True, mode=0o700)
    with FileLock(extension._target().parent / "lock"):
        assert extension.state() == "in Python: the extension is being built"
        extension.start()
        assert extension.reason() == "the extension is being built"
        assert "calls are recognised in Python: the extension is being built" in str(pygraph.jit(torch.sin).explain())
    assert extension.start(wait=True) is None


def test_who_waits_for_a_build_finds_what_it_has_made(tmp_path: Path) -> None:
    target = tmp_path / "library.so"
    target.write_bytes(b"made")
    assert builder.main([str(target), "1", "false"]) == 0
    assert target.read_bytes() == b"made"
    other = tmp_path / "other.so"
    assert builder.main([str(other), "1", shutil.which("false") or "false"]) == 1
    assert builder.failure_of(other).read_text() == "the compiler returned 1"
    assert builder.main([str(other), "0.2", "sh", "-c", "sleep 9"]) == 1
    assert "timed out" in builder.failure_of(other).read_text()


def test_what_is_kept_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    kept = [tmp_path / "selections" / "ab" / "c.json", tmp_path / "costs-4.json", tmp_path / ("0a" * 10) / "x.so"]
    kept.append(tmp_path / "inductor" / "pygraph" / "recipe")
    others = [tmp_path / "mine.txt", tmp_path / "inductor" / "theirs"]
    for path in (*kept, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
    assert {what: len(paths) for what, paths in cache.stored().items()} == {"C++ path": 1, "selections": 1, "costs": 1}
    assert main(["info", "--clear"]) == 0
    assert capsys.readouterr().out.startswith("removed: 16 B")
    assert not any(path.exists() for path in kept)
    assert all(path.exists() for path in others)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"pygraph {__version__}\n"


def test_info_names_versions_and_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    told = capsys.readouterr().out
    for part in ("pygraph", __version__, "torch", "triton", "device", "calls", "on disk", "selections"):
        assert part in told
