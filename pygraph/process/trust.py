"""Whether a file is to be believed: only where nobody else can have put it.

A library is code, and whoever can write to its folder could have this process run theirs. Trusted are the user of this
process, root, and the owner of pygraph itself, who could do so anyway.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from pathlib import Path


def distrust(path: Path) -> str | None:
    """The reason why a file, there or not, is not to be loaded; None if it may be.

    Args:
        path: The file. Its folders are looked at up to the root, both as they are named and as links lead.

    Example:
        >>> distrust(Path("/nowhere/yet")) is None
        True
    """
    places = dict.fromkeys([path, *path.absolute().parents, path.resolve(), *path.resolve().parents])
    for place in places:
        try:
            found = place.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{place} cannot be looked at: {error.strerror}"
        if found.st_uid not in _trusted():
            return f"{place} belongs to {_user(found.st_uid)}"
        # In a folder like /tmp, everybody may add files, and nobody can replace those of others.
        is_shared = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_mode & stat.S_IWOTH and not is_shared:
            return f"everybody can write to {place}: `chmod o-w {place}`"
        if found.st_mode & stat.S_IWGRP and not is_shared and not _is_alone(found.st_gid):
            return f"group {found.st_gid} can write to {place}: `chmod g-w {place}`"
    return None


@functools.cache
def _trusted() -> frozenset[int]:
    return frozenset({0, os.geteuid(), Path(__file__).stat().st_uid})


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


@functools.cache
def _is_alone(group: int) -> bool:
    """Whether a group has no members but this user, as the group of one's own name on many systems, or is root's."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == 0 or (found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name})
