"""Calls that were compiled, and in what each was unlike those before: what ``explain_misses()`` says."""

# Parts of keys are of any type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from pygraph.calls.function import Call
from pygraph.calls.keys import Key
from pygraph.errors import with_article
from pygraph.guards.torch_settings import KEY_TITLES
from pygraph.ir.paths import argument_path, flatten_with_path, is_answer
from pygraph.ir.structures import Container, containers_of

_MOST = 64
"""Misses of one function that are remembered."""

_COMPARED = 8
"""Earlier calls that a call is compared with."""

_LONGEST = 60
"""Characters of a value."""

_KEYS = 4
"""Keys of a dict that are shown."""

_OF_TENSORS = ("class", "shape", "strides", "dtype", "device", "alignment", "requires_grad", "inference")
"""The parts of a tensor's key, in their order."""


@dataclasses.dataclass(frozen=True)
class Miss:
    """A call for which nothing had been compiled.

    Attributes:
        number: Its number among the misses of the function, from 1.
        source: The user's line that made the call; None if it is not known.
        reason: In what it was unlike the call before that it was most like.
        outcome: What has become of it.
        seconds: The time that took.
    """

    number: int
    source: str | None
    reason: str
    outcome: str
    seconds: float

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source is not None else ""
        return f"miss {self.number}{where}: {self.reason}; {self.outcome}, in {self.seconds:.2f} s"


class _Described(NamedTuple):
    """A call's key in texts, so that no objects of the user's are held; hashes stand for what is not shown."""

    containers: dict[str, Container]
    paths: tuple[str, ...]
    leaves: tuple[tuple[str, ...], ...]
    identities: tuple[int, ...]
    numbers: dict[int, str]
    overlaps: int
    settings: tuple[int, ...]
    decisions: tuple[str, ...]

    @classmethod
    def of(cls, key: Key, call: Call, path_of: Callable[[str], str]) -> _Described:
        """Describe the key of a call.

        Args:
            key: The key.
            call: The call.
            path_of: The name that reports have for a path in ``(args, kwargs)``.
        """
        kind = key.kind
        flat, structure = flatten_with_path((call.args, call.kwargs))
        decisions = tuple(value for path, value in flat if is_answer(path))
        # Decisions come last, so that other leaves have their positions.
        paths = tuple(path_of(argument_path(path)) for path, _ in flat if not is_answer(path))
        numbers = {index: _of_part(value) for index, value in key.numbers if index < len(paths)}
        settings = tuple(hash(one) for one in kind.settings)
        shown = kind.leaves[: len(paths)]
        leaves, identities = tuple(map(_of_leaf, shown)), tuple(map(hash, shown))
        containers = {path_of(path): one for path, one in containers_of(structure, short_text).items()}
        return cls(containers, paths, leaves, identities, numbers, hash(kind.overlaps), settings, decisions)

    def text(self, path: str, other: _Described) -> str | None:
        """The text of what is at a path; None if nothing is, as where the container around it is another one.

        Args:
            path: The path.
            other: A call, whose keys are compared with those of a dict.
        """
        if path in self.paths:
            return _in_words(self.leaves[self.paths.index(path)])
        return _of_container(self.containers[path], other.containers.get(path)) if path in self.containers else None

    def is_alike(self, other: _Described) -> bool:
        """Whether two calls have arguments of one structure."""
        return self.containers == other.containers and len(self.leaves) == len(other.leaves)


class Misses:
    """The last misses of one function.

    Args:
        path_of: The name that reports have for a path in ``(args, kwargs)``.

    Attributes:
        found: Them, the oldest first.
    """

    def __init__(self, path_of: Callable[[str], str] = str) -> None:
        self._path_of = path_of
        self.found: collections.deque[Miss] = collections.deque(maxlen=_MOST)
        self._earlier: collections.deque[_Described] = collections.deque(maxlen=_MOST)
        self._count = 0

    def note(self, key: Key, call: Call, changed: str | None, source: str | None, outcome: str, seconds: float) -> None:
        """Add a miss.

        Args:
            key: The key of the call.
            call: The call.
            changed: What the function reads that has changed since the last call with this key; None if nothing has.
            source: The user's line.
            outcome: What has become of it.
            seconds: The time that took.
        """
        self._count += 1
        now = _Described.of(key, call, self._path_of)
        self.found.append(Miss(self._count, source, self._reason(now, changed), outcome, seconds))
        if now in self._earlier:
            self._earlier.remove(now)
        self._earlier.append(now)

    def _reason(self, now: _Described, changed: str | None) -> str:
        if not self._earlier:
            return "the first call"
        if now in self._earlier:
            return f"{changed} has changed" if changed else "what was compiled for such calls is not there any more"
        recent = list(self._earlier)[: -_COMPARED - 1 : -1]
        alike = [other for other in recent if now.is_alike(other)] or recent
        fewest = min((list(_differences(now, other)) for other in alike), key=len)
        if not now.is_alike(alike[0]):
            del fewest[1:]  # which mostly follow from the first
        return ", ".join(fewest) or "a number is another one, and is passed from now on"


def _differences(now: _Described, before: _Described) -> Iterator[str]:
    """In what a call is unlike another one; if their structures differ, only in these."""
    if not now.is_alike(before):
        yield from _of_structures(now, before)
        return
    identities = zip(now.identities, before.identities, strict=True)
    for name, leaf, other, (one, two) in zip(now.paths, now.leaves, before.leaves, identities, strict=True):
        if leaf != other:
            yield _of_leaves(name, leaf, other)
        elif one != two:
            yield f"{name} is another object, {_in_words(leaf)}"
    for index, value in now.numbers.items():
        if index not in before.numbers:
            yield f"{now.paths[index]}, which is {value}, decides what the function does"
        elif before.numbers[index] != value:
            yield f"{now.paths[index]} is {value} and was {before.numbers[index]}"
    if now.overlaps != before.overlaps:
        yield "arguments share memory otherwise"
    settings = zip(KEY_TITLES, now.settings, before.settings, strict=False)
    yield from (f"{title} is another setting" for title, one, other in settings if one != other)
    decisions = enumerate(itertools.zip_longest(now.decisions, before.decisions, fillvalue="not asked for"), 1)
    for number, (one, other) in decisions:
        if one != other:
            yield f"decision {number} by values on the device is {one} and was {other}"


def _of_structures(now: _Described, before: _Described) -> Iterator[str]:
    """The containers in which a structure is unlike another one, by their paths."""
    for path in [*now.containers, *(path for path in before.containers if path not in now.containers)]:
        if now.containers.get(path) != before.containers.get(path):
            one, other = now.text(path, before), before.text(path, now)
            if one is not None and other is not None:
                yield f"{path} is {one} and was {other}" if one != other else f"{path} is of another kind, {one}"


def _of_leaves(name: str, leaf: tuple[str, ...], before: tuple[str, ...]) -> str:
    """In what a leaf is unlike another one."""
    if len(leaf) == len(before) == len(_OF_TENSORS):
        changes = zip(_OF_TENSORS, leaf, before, strict=True)
        parts = [f"{what} {now}, was {then}" for what, now, then in changes if now != then]
        # Strides follow from a shape, and say nothing more.
        return f"{name} has {' and '.join(part for part in parts if len(parts) == 1 or not part.startswith('strides'))}"
    return f"{name} is {_in_words(leaf)} and was {_in_words(before)}"


def _of_container(container: Container, other: Container | None) -> str:
    """The text of a container; of many keys, those come first that another one does not have."""
    if not container.keys:
        return f"an empty {container.name}"
    if not container.is_keyed:
        return f"a {container.name} of {len(container.keys)}"
    keys, more = list(container.keys), len(container.keys) - _KEYS
    if more > 0:
        keys.sort(key=(() if other is None else other.keys).__contains__)
    return f"a {container.name} of {', '.join(keys[:_KEYS])}{f' and {more} more' if more > 0 else ''}"


def _in_words(leaf: tuple[str, ...]) -> str:
    return leaf[0] if len(leaf) == 1 else "a tensor"


def _of_leaf(key: Hashable) -> tuple[str, ...]:
    """The texts of a leaf's key: several of a tensor, one of anything else."""
    if isinstance(key, tuple) and len(key) == len(_OF_TENSORS):
        return tuple(map(_of_part, key))
    return (_of_part(key),)


def _of_part(key: Any) -> str:
    """A part of a key, as a user would write it."""
    if isinstance(key, torch.Size):
        return str(tuple(key))
    if isinstance(key, type):
        return with_article(key)
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], type):
        kind, value = key
        return value if isinstance(value, str) and not issubclass(kind, str) else short_text(value)
    return short_text(key)


def short_text(value: object) -> str:
    """The text of a value, cut if it is long; of one that has none, its class."""
    try:
        text = repr(value)
    except Exception:  # whatever a class of the user's may raise
        return f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
