"""Compiles the extension in a process of its own, which may outlive the one that wanted it.

``python builder.py TARGET SECONDS COMMAND…`` runs a compiler, whose last argument is to be the file that it makes, and
moves that to TARGET in one step. One process at a time builds; the others wait for it and find its file. What went
wrong is left beside TARGET. This file is run by its path and imports little, as importing pygraph would import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock


def main(argv: Sequence[str]) -> int:
    """Build; 1 if that failed."""
    target, seconds, *command = argv
    path, most = Path(target), float(seconds)
    with FileLock(path.parent / "lock", timeout=2 * most):
        if path.exists():
            return 0
        failure = failure_of(path)
        failure.unlink(missing_ok=True)
        try:
            compile_to(path, command, most)
        except (OSError, subprocess.SubprocessError) as error:
            failure.write_text(first_line(error), encoding="utf-8")
            return 1
    return 0


def failure_of(path: Path) -> Path:
    """The file that says why a library could not be built."""
    return path.with_name("failed")


def compile_to(path: Path, command: Sequence[str], seconds: float) -> None:
    """Run a compiler, and have what it makes at a path in one step."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        subprocess.run([*command, str(made)], check=True, capture_output=True, timeout=seconds)
        os.replace(made, path)


def first_line(error: Exception) -> str:
    """The first error of a compiler, or the first line of an exception."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or b"").decode(errors="replace").splitlines() if "error" in line]
        return lines[0] if lines else f"the compiler returned {error.returncode}"
    return (str(error).splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
