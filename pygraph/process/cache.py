"""The directory of data that outlives a process: measurements and compiled code; and what such data depends on."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import shutil
from pathlib import Path


def cache_directory() -> Path:
    """``PYGRAPH_CACHE_DIR``, or the user's cache directory for pygraph; it need not exist yet."""
    if folder := os.environ.get("PYGRAPH_CACHE_DIR"):
        return Path(folder)
    try:
        import platformdirs
    except ImportError:  # a checkout used in place, without its dependencies
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pygraph"
    return platformdirs.user_cache_path("pygraph")


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone, whatever the process's umask is.

    Raises:
        OSError: It cannot be made.
    """
    for place in reversed([folder, *folder.parents]):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)


_STORED = {"C++ path": "[0-9a-f]" * 20, "selections": "selections", "costs": "costs-*.json"}
"""Patterns of what lies in the cache directory; there may be other things in one that the user has chosen."""


def stored() -> dict[str, list[Path]]:
    """Files and folders in the cache directory, by what they are."""
    return {what: sorted(cache_directory().glob(pattern)) for what, pattern in _STORED.items()}


def files(path: Path) -> list[Path]:
    """The file, or all files in the folder."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def remove(path: Path) -> int:
    """Remove a file, or a folder with all that is in it; returns the bytes of its files."""
    size = sum(file.stat().st_size for file in files(path))
    if path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
    return size


def readable(size: float) -> str:
    """Bytes in units that people read.

    >>> readable(999), readable(1_234_567)
    ('999 B', '1.2 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


@functools.cache
def source_hash() -> str:
    """A hash of the library's source, for keys of what it has made."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def installed_version(package: str) -> str:
    """The version of an installed package, or ``none``.

    >>> installed_version("no-such-package")
    'none'
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
