"""Building the extension on first use, and loading it.

Unless a wheel carries it, it is compiled by one call of the compiler into a folder of its own below the user's cache,
named by all that it depends on. A process of its own does that (`pygraph.process.builder`), so that a short script does
not end it.
"""

# Torch's paths for extensions have no types.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from pygraph.process import builder, extension_source
from pygraph.process.cache import cache_directory, make_private
from pygraph.process.trust import distrust

_TIMEOUT = 600
_NOT_BUILT = "the extension could not be built: {}"

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
    """The reason why calls take the path in Python; None if they do not, or if nothing has asked for another path."""
    if not enabled():
        return "PYGRAPH_NATIVE=0"
    return "the extension is being built" if _module is None and _is_building() else _reason


def state() -> str:
    """How calls are recognised, or will be; an extension that has been built is loaded for that, and none is built."""
    path = _target()
    if enabled() and _module is None and path.exists():
        start(wait=True)
    if _module is not None and enabled():
        return f"in C++, by {_module.__file__}"
    if reason() is not None:
        return f"in Python: {reason()}"
    if path.parent.is_dir():
        try:
            with FileLock(path.parent / "lock", timeout=0):
                pass
        except Timeout:
            return "in Python: the extension is being built"
    return (
        "in Python: the extension is not built yet; the first compilation has that done, or `python -m pygraph build`"
    )


def _is_building() -> bool:
    return _thread is not None and _thread.is_alive()


def start(wait: bool = False) -> Any:
    """Load the extension; if it has to be built first, have that done meanwhile, or ``wait`` for it.

    Returns:
        The extension, or None if it is not there (yet); `reason` says why.
    """
    global _thread
    if not enabled():
        return None
    with _lock:
        if _module is None and _reason is None and not _is_building():  # nor in a process that has been forked
            path = _target()
            if path.exists():
                _load(path)
            elif (process := _begin(path)) is not None:
                _thread = threading.Thread(target=_finish, args=(process, path), name="pygraph build", daemon=True)
                _thread.start()
        thread = _thread
    if wait and thread is not None:
        thread.join()
    return loaded()


def _begin(path: Path) -> subprocess.Popen[bytes] | None:
    """Start the process that builds the extension, at once, as this one may end soon; None if that fails."""
    global _reason
    compiler = _compiler()
    failure = "no C++ compiler was found" if compiler is None else None
    try:
        make_private(path.parent)
        failure = failure or distrust(path.parent)
        if failure is None:
            script = [sys.executable, "-P", builder.__file__, str(path), str(_TIMEOUT), str(compiler), *_flags()]
            return subprocess.Popen(
                [*script, *_paths(), "-o"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
    except (OSError, ImportError) as error:
        failure = builder.first_line(error)
    _reason = _NOT_BUILT.format(failure)
    return None


def _finish(process: subprocess.Popen[bytes], path: Path) -> None:
    """Wait for that process, and load what it has built."""
    global _reason
    _, errors = process.communicate()
    if path.exists():
        _load(path)
        return
    try:
        failure = builder.failure_of(path).read_text(encoding="utf-8")
    except OSError:
        lines = errors.decode(errors="replace").strip().splitlines()
        failure = lines[-1] if lines else f"its process ended with {process.returncode}"
    _reason = _NOT_BUILT.format(failure)


def _load(path: Path) -> None:
    global _module, _reason
    if (doubt := distrust(path)) is not None:
        _reason = f"the extension is not loaded: {doubt}"
        return
    try:
        loader = importlib.machinery.ExtensionFileLoader(extension_source.NAME, str(path))
        spec = importlib.util.spec_from_file_location(extension_source.NAME, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        _reason = f"the extension could not be loaded: {builder.first_line(error)}"
        return
    _module = module


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")


def _flags() -> list[str]:
    """How the extension is compiled, but for where torch lies."""
    return [
        *extension_source.FLAGS, "-shared", "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        str(extension_source.FOLDER / "dispatch.cpp"),
    ]  # fmt: skip


def _paths() -> list[str]:
    """The headers and libraries of torch and Python."""
    from torch.utils import cpp_extension  # importing it takes a twentieth of a second, and only a build needs it

    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    return [*(f"-I{path}" for path in includes), *libraries, "-ltorch_python", "-ltorch_cpu", "-lc10"]


def _target() -> Path:
    """The path of the extension: that of a wheel, or one in the cache, built or not.

    Its folder's name is a digest of everything that its bytes depend on.
    """
    if (ready := extension_source.prebuilt()) is not None:
        return ready
    digest = hashlib.sha256(extension_source.digest().encode())
    for part in (sys.version, torch.__version__, torch.__file__, *_flags(), str(_compiler())):
        digest.update(part.encode())
    return cache_directory() / digest.hexdigest()[:20] / extension_source.file_name()
