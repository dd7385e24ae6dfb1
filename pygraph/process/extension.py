"""Building the extension on first use, and loading it.

It is compiled by one call of the compiler into a folder of its own below the user's cache, named by all that it depends
on, and moved there in one step: processes that build at the same time do not disturb each other.
"""

# The flag of the C++ library that torch was built with is known to torch._C only. Checked with torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from pygraph.process.cache import cache_directory

_FOLDER = Path(__file__).parent.parent / "native"
_NAME = "pygraph_native"
_TIMEOUT = 600

_lock = threading.Lock()
_thread: threading.Thread | None = None
_module: Any = None
_reason: str | None = None


def enabled() -> bool:
    """Whether the extension is wanted: unless ``PYGRAPH_NATIVE=0``."""
    return os.environ.get("PYGRAPH_NATIVE", "1") != "0"


def loaded() -> Any:
    """The extension if it is there and wanted, else None; never waits."""
    return _module if _module is not None and enabled() else None


def reason() -> str | None:
    """The reason why calls take the path in Python; None if they do not, or while the extension is being built."""
    return _reason if enabled() else "PYGRAPH_NATIVE=0"


def start(wait: bool = False) -> Any:
    """Load the extension; if it has to be built first, do that in a thread meanwhile, or ``wait`` for it.

    Returns:
        The extension, or None if it is not there (yet); `reason` says why.
    """
    global _thread
    if not enabled():
        return None
    with _lock:
        if _module is None and _reason is None and _thread is None:
            path = _target()
            if path.exists():
                _load(path)
            else:
                _thread = threading.Thread(target=_build_and_load, args=(path,), name="pygraph build", daemon=True)
                _thread.start()
        thread = _thread
    if wait and thread is not None:
        thread.join()
    return loaded()


def _build_and_load(path: Path) -> None:
    global _reason
    try:
        with _lock_builds(path):
            if not path.exists():
                _compile(path)
    except (OSError, subprocess.SubprocessError) as error:
        _reason = f"the extension could not be built: {_first_line(error)}"
        return
    _load(path)


def _load(path: Path) -> None:
    global _module, _reason
    try:
        loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
        spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        _reason = f"the extension could not be loaded: {_first_line(error)}"
        return
    _module = module


@contextlib.contextmanager
def _lock_builds(path: Path) -> Generator[None, None, None]:
    """One process at a time builds; the lock goes with its process, so that it is never stale."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path.parent / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(path: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        subprocess.run([compiler, *_flags(), "-o", str(made)], check=True, capture_output=True, timeout=_TIMEOUT)
        os.replace(made, path)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")


def _flags() -> list[str]:
    base = Path(torch.__file__).parent
    includes = [base / "include", base / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    return [
        "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{include}" for include in includes),
        str(_FOLDER / "dispatch.cpp"),
        f"-L{base / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip


def _target() -> Path:
    """The path of the extension, built or not: its folder's name is a digest of everything that its bytes depend on."""
    digest = hashlib.sha256()
    for source in sorted(path for path in _FOLDER.iterdir() if path.suffix in (".cpp", ".h")):
        digest.update(source.read_bytes())
    for part in (sys.version, torch.__version__, torch.__file__, *_flags(), str(_compiler())):
        digest.update(part.encode())
    return cache_directory() / digest.hexdigest()[:20] / f"{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _first_line(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or b"").decode(errors="replace").splitlines() if "error" in line]
        return lines[0] if lines else f"the compiler returned {error.returncode}"
    return (str(error).splitlines() or [type(error).__name__])[0]
