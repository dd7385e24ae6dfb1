"""Memory of the host that is left: a process that asks for more than there is may be ended by the system."""

from __future__ import annotations

import contextlib
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")  # of cgroups in version 2, as a process in a container sees its own

_RESERVE = 8
"""So much of all memory stays free, as a divisor."""


def has_room(nbytes: int) -> bool:
    """Whether so many bytes leave the host, or the container, an eighth of its memory.

    Where neither says how much there is, as on other systems than Linux, there is room.
    """
    return all(nbytes <= free - total // _RESERVE for total, free in (_of_host(), _of_container()) if total)


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
