"""Passes of stacks that users list: those of the transforms that they name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pygraph.api.transforms import Transform, devicify, fuse, graphify, indirect, select
from pygraph.errors import ArgumentError, describe
from pygraph.transforms.passes import DEVICIFY, FUSE, GRAPHIFY, INDIRECT, SELECT, Pass, check_passes, with_pass

_STANDARD: tuple[tuple[Any, Pass], ...] = (
    (devicify, DEVICIFY), (fuse, FUSE), (indirect, INDIRECT), (graphify, GRAPHIFY), (select, SELECT),
)  # fmt: skip


def passes_of(transforms: Iterable[Any]) -> tuple[Pass, ...]:
    """The passes of transforms, in the order in which they are applied.

    Raises:
        ArgumentError: Something is no transform.
        StageError: They are in an order in which one does not take what another leaves.
    """
    if not isinstance(transforms, Iterable) or isinstance(transforms, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        name = getattr(transforms, "__name__", repr(transforms))
        remedy = f"Write passes=[{name}] for one." if callable(transforms) else None
        raise ArgumentError(describe("jit(…)", f"passes={name}", expected="a list of transforms", remedy=remedy))
    found: list[Pass] = []
    for one in transforms:
        known = one.applied if isinstance(one, Transform) else next((p for fn, p in _STANDARD if fn is one), None)
        if known is None:
            raise ArgumentError(
                describe("jit(…)", f"{one!r} in passes is no transform",
                         remedy="Pass pygraph's transforms, and what pygraph.transform returns.")
            )  # fmt: skip
        found.append(known)
    return check_passes(found, "fn")


def completed(passes: tuple[Pass, ...], defaults: Sequence[Pass]) -> tuple[Pass, ...]:
    """Passes with those that are missing of a default stack, each where it fits."""
    for one in defaults:
        if one not in passes:
            passes = with_pass(passes, one) or passes
    return passes
