"""Blocks without garbage collection: finalizers must not run operations in the middle of a trace or a recording.

Their operations would be recorded with the rest and repeated at every replay; and tensors that are freed while a CUDA
graph is captured call into the driver at the wrong time.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pygraph.process import extension

_lock = threading.RLock()  # a signal handler may come here while the same thread is here
_depth = 0
_blocks = 0  # of both kinds
_was_on = False


class _Here(threading.local):
    depth = blocks = 0


_here = _Here()
"""Of the current thread: in how many blocks of `no_collection` it is, and of both kinds."""


class _Block:
    """A block without collections, which nests, also across threads; there is one object for all blocks of a kind.

    Args:
        strict: Whether not even a collection that is asked for may come.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict

    def __enter__(self) -> None:
        global _depth
        with _lock:
            _begin()
            if self._strict:
                _depth += 1
                _here.depth += 1

    def __exit__(self, *error: object) -> None:
        global _depth
        with _lock:
            if self._strict:
                _depth -= 1
                _here.depth -= 1
            _end()


_NO_COLLECTION, _POSTPONED = _Block(strict=True), _Block(strict=False)


def no_collection() -> contextlib.AbstractContextManager[None]:
    """A block in which the garbage collector does not start by itself; nests, also across threads.

    Example:
        >>> import gc
        >>> with no_collection():
        ...     gc.isenabled()
        False
        >>> gc.isenabled()
        True
    """
    return _NO_COLLECTION


def collection_postponed() -> contextlib.AbstractContextManager[None]:
    """A block in which the garbage collector does not start by itself, but may be asked to: for speed alone.

    What compiles a step makes so many objects that all objects of the process are looked through several times, each
    of which takes a fifth of a second in a process with a few large packages.
    """
    return _POSTPONED


def _begin() -> None:
    global _blocks, _was_on
    _blocks += 1
    _here.blocks += 1
    if _blocks == 1:
        _was_on = gc.isenabled()
        gc.disable()


def _end() -> None:
    global _blocks
    if _blocks == 1 and _was_on:
        gc.enable()
    _blocks -= 1
    _here.blocks -= 1


def collect(generation: int = 2) -> bool:
    """Collect garbage up to a generation, in a block of `no_collection`, unless it is inside of another one, or another
    thread is; whether it was done.
    """
    with _lock:
        if _depth > 1:
            return False
        gc.collect(generation)
        return True


# Another thread may be filling a tuple of unknown length, which fails if anybody else refers to it when it grows. So a
# list of all objects must be gone before another thread can run. C++ looks through one without letting go of the
# interpreter. Where there is no extension, it lives within one call in C, in which no other code runs, unless there are
# audit hooks: these are called for each `id`, and for calls of `gc`.


def ids_of_objects(generation: int | None = None) -> list[int]:
    """The ids of all objects that the collector knows, or of those in a generation, in its order."""
    # CPython hashes by address, without the lowest bits, which are zero for what the collector knows (3.11 to 3.14).
    return list(map(int.__lshift__, map(object.__hash__, _all_objects(generation)), itertools.repeat(4)))


def objects_of(is_wanted: Callable[[type], bool]) -> list[Any]:
    """All objects of classes that are wanted that the collector knows, but tuples; in a block of `no_collection`."""
    native = extension.loaded()
    kinds: Iterable[type] = set(map(type, _all_objects(None))) if native is None else native.classes_of_objects()
    wanted = frozenset(kind for kind in kinds if kind is not tuple and is_wanted(kind))
    if native is not None:
        return native.objects_of(*wanted)
    found: list[Any] = []
    for generation in range(3):
        # Two lists, as what splits one in two would be in it, and hold itself. The second one has more at its end, of
        # no wanted class; it must be read to there, since it holds what reads it.
        found += itertools.compress(
            itertools.chain(_all_objects(generation), itertools.repeat(None)),
            map(wanted.__contains__, map(type, _all_objects(generation))),
        )
    return found


def referrers_of(values: list[Any]) -> list[Any]:
    """All objects that refer to one of these and that the collector knows, but this list, and but tuples that belong to
    nothing yet; without the extension these are among them.
    """
    native = extension.loaded()
    found: list[Any] = gc.get_referrers(*values) if native is None else native.referrers_of(*values)
    return [one for one in found if one is not values]


def references_leading_to(values: list[Any], through: frozenset[int]) -> list[tuple[Any, Any]]:
    """The references on all ways to some objects, each as a referrer and its referent; not from this thread's frames.

    Args:
        values: The objects. The list itself counts as nobody.
        through: The ids of objects through which a way may lead. At any other referrer it ends.
    """
    skipped = {id(values), *_running_frames()}
    native = extension.loaded()
    if native is None:
        return _layer_by_layer(values, through, skipped)
    found = native.references_leading_to(values, through, skipped)
    return list(zip(found[::2], found[1::2], strict=True))


# The number of layers that are looked for one by one: garbage that could not be collected may be a long chain.
_DISTANCE = 24


def _layer_by_layer(values: list[Any], through: frozenset[int], skipped: set[int]) -> list[tuple[Any, Any]]:
    """As `references_leading_to`, by a search among all objects for each step of the ways."""
    skipped |= _running_frames()
    found: list[Any] = []  # flat, so that nothing else of this search refers to what it finds
    layer, reached = values, set(map(id, values))
    for _ in range(_DISTANCE):
        above: list[Any] = []
        ids = set(map(id, layer))
        for referrer in referrers_of(layer):
            if id(referrer) in skipped or referrer is found or referrer is above:
                continue
            for item in {id(item): item for item in gc.get_referents(referrer) if id(item) in ids}.values():
                found += [referrer, item]
            if id(referrer) in through and id(referrer) not in reached:
                reached.add(id(referrer))
                above.append(referrer)
        if not above:
            break
        layer = above
    return list(zip(found[::2], found[1::2], strict=True))


def _running_frames() -> set[int]:
    """The ids of this thread's frames."""
    found: set[int] = set()
    frame: types.FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back
    return found


def _all_objects(generation: int | None) -> Iterator[Any]:
    """All objects that the collector knows, or those in a generation, listed when the first one is taken."""
    return itertools.chain.from_iterable(map(gc.get_objects, (generation,)))


def _after_fork() -> None:
    """Have the garbage collector start again in a child process, where other threads and their blocks do not exist."""
    global _depth, _blocks
    _lock._at_fork_reinit()  # pyright: ignore  # as CPython does for its own locks, 3.11 to 3.14
    if _blocks and not _here.blocks and _was_on:
        gc.enable()
    _depth, _blocks = _here.depth, _here.blocks


os.register_at_fork(after_in_child=_after_fork)
