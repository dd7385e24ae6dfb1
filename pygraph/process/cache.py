"""The directory of data that outlives a process: measurements and compiled code; and what such data depends on."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
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
