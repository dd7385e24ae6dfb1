"""The extension's source, how it is compiled, and what a wheel carries of it ready-made.

A wheel that was made with ``PYGRAPH_PREBUILT=1`` (setup.py) has the library beside its source, and a note that says for
what it was compiled. Where that is not what runs here, the library is compiled on first use, as without it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

NAME = "pygraph_native"
FOLDER = Path(__file__).parent.parent / "native"
FLAGS = ("-O2", "-std=c++20", "-fvisibility=hidden", "-w")


def digest() -> str:
    """A hash of all source files."""
    found = hashlib.sha256()
    for source in sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h")):
        found.update(source.read_bytes())
    return found.hexdigest()


def file_name() -> str:
    """The name of the library's file, which has the version of Python."""
    return f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def identity() -> str:
    """Everything that a library is compiled for."""
    return " ".join((torch.__version__, file_name(), digest(), *FLAGS))


def note_of(library: Path) -> Path:
    """The file that says for what a library was compiled."""
    return library.with_name(f"{NAME}.txt")


def prebuilt() -> Path | None:
    """The library of a wheel, if it was compiled for what runs here."""
    library = FOLDER / file_name()
    try:
        return library if note_of(library).read_text(encoding="utf-8") == identity() and library.exists() else None
    except OSError:
        return None
