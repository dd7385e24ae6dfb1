"""The directory of data that outlives a process: measurements and compiled code."""

from __future__ import annotations

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
