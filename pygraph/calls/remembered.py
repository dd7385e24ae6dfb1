"""Selections that outlive a process: in the user's cache directory, one file for each Program and machine.

Files are JSON and are checked when they are read: one that is damaged, or of another version, is measured anew and
written again. They are replaced in one step, so that processes that write at the same time do no harm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pygraph.ir.program import Program
from pygraph.ir.selections import Selection
from pygraph.process.cache import cache_directory, make_private, source_hash
from pygraph.process.trust import distrust
from pygraph.runtime.driver import Driver
from pygraph.runtime.selecting import SelectionPolicy

_FORMAT = 1
_LARGEST = 1 << 20
"""Bytes of a file that is read."""

_MOST_FILES = 64
"""Files in a folder, of which there are 256; the oldest ones make room."""


@dataclasses.dataclass(frozen=True)
class Remembered:
    """The selections of one Program, on disk.

    Attributes:
        key: A hash of the Program with its shapes, of how it selects, of the device, and of all versions.
    """

    key: str

    @classmethod
    def of(cls, program: Program, driver: Driver, policy: SelectionPolicy) -> Remembered | None:
        """The file of a Program; None if its selections are not remembered.

        Args:
            program: A Program at stage ``regions``, as it is recorded.
            driver: The device.
            policy: How it selects; by a timer of a caller's, nothing is remembered.
        """
        identity = driver.identity()
        if identity is None or not policy.measures or policy.timer is not None:
            return None
        parts = [str(_FORMAT), source_hash(), *identity, policy.objective, str(program)]
        return cls(hashlib.sha256("\0".join(parts).encode()).hexdigest())

    @property
    def path(self) -> Path:
        """The path of the file."""
        return cache_directory() / "selections" / self.key[:2] / f"{self.key[2:]}.json"

    def read(self) -> tuple[int, dict[int, Selection]]:
        """The number of regions that the Program is cut into, and their selections; none if no file can be used."""
        try:
            if distrust(self.path) is not None:
                return 0, {}
            with self.path.open("rb") as file:
                data: Any = json.loads(file.read(_LARGEST))
            if data["format"] != _FORMAT or data["key"] != self.key:
                return 0, {}
            found = {int(index): Selection.from_dict(one) for index, one in data["selections"].items()}
            return int(data["regions"]), found
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # whatever a file may hold
            return 0, {}

    def write(self, program: Program, selections: Mapping[int, Selection]) -> None:
        """Remember selections that are final; where the directory cannot be written to, they are measured again.

        Args:
            program: The Program as it was cut in the end.
            selections: Its selections.
        """
        if not selections or any(one.provisional is not None for one in selections.values()):
            return
        data = {str(index): one.to_dict() for index, one in selections.items()}
        text = json.dumps({"format": _FORMAT, "key": self.key, "regions": len(program.regions), "selections": data})
        folder = self.path.parent
        with contextlib.suppress(OSError):
            make_private(folder)
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as scratch:
                scratch.write(text)
            Path(scratch.name).replace(self.path)
            _make_room(folder)


def _make_room(folder: Path) -> None:
    """Remove the oldest files of a folder that has too many."""
    files = list(folder.glob("*.json"))
    if len(files) > _MOST_FILES:
        files.sort(key=lambda path: path.stat().st_mtime)
        for path in files[: len(files) - _MOST_FILES]:
            path.unlink(missing_ok=True)
