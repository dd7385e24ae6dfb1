"""Memory of the host that is left: a process that asks for more than there is may be ended by the system."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")  # of cgroups in version 2, as a process in a container sees its own

_RESERVE = 8
"""So much of all memory stays free, as a divisor."""

_FRESH = 0.05
"""For so many seconds, what the system has said holds, less what was asked for since."""


@dataclasses.dataclass
class _Room:
    """Bytes that may still be asked for.

    Attributes:
        nbytes: How many there are; None if the system does not say.
        known_at: When it said so.
    """

    nbytes: int | None = None
    known_at: float = float("-inf")

    def update(self) -> None:
        if time.monotonic() - self.known_at > _FRESH:
            self.nbytes = min((free - total // _RESERVE for total, free in _systems() if total), default=None)
            self.known_at = time.monotonic()


_room = _Room()


def has_room(nbytes: int) -> bool:
    """Whether so many bytes, which the caller then takes, leave the host, or the container, an eighth of its memory.

    Where neither says how much there is, as on other systems than Linux, there is room.
    """
    _room.update()
    if _room.nbytes is None:
        return True
    if nbytes > _room.nbytes:
        return False
    _room.nbytes -= nbytes
    return True


def _systems() -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes in all and bytes left of the host, and of the container."""
    return _of_host(), _of_container()


def _of_host() -> tuple[int, int]:
    """Bytes in all, and bytes that programs can have, with what files only cache; zeros if unknown."""
    found = {"MemTotal": 0, "MemAvailable": 0}
    with contextlib.suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) * 1024
    return found["MemTotal"], found["MemAvailable"]


def _of_container() -> tuple[int, int]:
    """The limit of bytes, and what is left of it, without what files only cache; zeros if there is no limit."""
    with contextlib.suppress(OSError, ValueError):  # "max" is no limit
        limit = int((_CONTAINER / "memory.max").read_text())
        used = int((_CONTAINER / "memory.current").read_text())
        for line in (_CONTAINER / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
        return limit, limit - used
    return 0, 0
