"""The layout of a drawing: a box for every node of an outline, in layers by depth, and a frame around every region."""

from __future__ import annotations

import dataclasses

from pygraph.ir.outline import Outline, blocks

WIDTH, HEIGHT = 176, 44
"""Pixels of a box."""

_ACROSS, _DOWN = 22, 26
"""Pixels between boxes."""

_MARGIN, _TITLE = 16, 26
"""Pixels between a frame and its boxes, and the height of its title."""

_MOST_ACROSS = 6
"""Boxes side by side; a layer of more takes several rows."""

_FEWEST_ACROSS = 3
"""Boxes for which a frame has room, and so its title."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """A frame around the boxes that stand together.

    Attributes:
        key: ``inputs``, ``outputs``, or the region; None for nodes that are in no region.
        x: Pixels from the left.
        y: Pixels from the top.
        width: Pixels across.
        height: Pixels down.
        more: How many nodes there are besides those that are drawn.
    """

    key: int | str | None
    x: int
    y: int
    width: int
    height: int
    more: int = 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """Positions of everything that is drawn.

    Attributes:
        nodes: Left and upper edge of the box of each node.
        outputs: Those of each output's box.
        frames: The frames, from top to bottom.
        width: Pixels across.
        height: Pixels down.
    """

    nodes: list[tuple[int, int]]
    outputs: list[tuple[int, int]]
    frames: list[Frame]
    width: int
    height: int


def layout(outline: Outline) -> Layout:
    """Find a location for every node: below all that it takes, and near the middle of that."""
    centres: dict[int, float] = {}
    corners: dict[int, tuple[int, int]] = {}
    frames: list[Frame] = []
    top = _MARGIN
    groups = blocks(outline.nodes)
    keys = [key for key, _ in groups]
    groups += [(key, []) for key in outline.more if key not in keys and key != "outputs"]
    for key, members in groups:
        rows = _rows(outline, members, centres)
        frames.append(_add(key, rows, top, corners, outline.more.get(key, 0)))
        centres.update((one, corners[one][0] + WIDTH / 2) for row in rows for one in row)
        top = frames[-1].y + frames[-1].height + _DOWN
    first = len(outline.nodes)
    every = list(range(first, first + len(outline.outputs)))
    if every or outline.more.get("outputs"):
        rows = [every[start : start + _MOST_ACROSS] for start in range(0, len(every), _MOST_ACROSS)]
        frames.append(_add("outputs", rows, top, corners, outline.more.get("outputs", 0)))
        top = frames[-1].y + frames[-1].height + _DOWN
    width = max((frame.width for frame in frames), default=WIDTH) + 2 * _MARGIN
    frames = [dataclasses.replace(frame, width=width - 2 * _MARGIN) for frame in frames]
    return Layout(
        [corners[one] for one in range(first)], [corners[one] for one in every], frames, width, top - _DOWN + _MARGIN
    )


def _rows(outline: Outline, members: list[int], centres: dict[int, float]) -> list[list[int]]:
    """The boxes of a frame, row by row: every node is below those that it takes, and these are not far above."""
    depths: dict[int, int] = {}
    for one in members:
        inside = [depths[other] for other in outline.nodes[one].arguments if other in depths]
        depths[one] = 1 + max(inside, default=-1)
    for one, user in _first_users(outline, members).items():
        depths[one] = depths[user] - 1
    layers: list[list[int]] = [[] for _ in range(max(depths.values(), default=-1) + 1)]
    for one in members:
        layers[depths[one]].append(one)
    rows: list[list[int]] = []
    for layer in layers:
        layer.sort(key=lambda one: _middle(outline, one, centres))
        for start in range(0, len(layer), _MOST_ACROSS):
            rows.append(layer[start : start + _MOST_ACROSS])
            for column, one in enumerate(rows[-1]):
                centres[one] = _left(column) + WIDTH / 2
    return rows


def _first_users(outline: Outline, members: list[int]) -> dict[int, int]:
    """By node that takes nothing of its frame, the first of its users there, above which it stands."""
    inside = set(members)
    found: dict[int, int] = {}
    for one in members:
        for other in outline.nodes[one].arguments:
            if other in inside and inside.isdisjoint(outline.nodes[other].arguments):
                found.setdefault(other, one)
    return found


def _middle(outline: Outline, one: int, centres: dict[int, float]) -> float:
    found = [centres[other] for other in outline.nodes[one].arguments if other in centres]
    return sum(found) / len(found) if found else 0.0


def _left(column: int) -> int:
    return 2 * _MARGIN + column * (WIDTH + _ACROSS)


def _add(
    key: int | str | None, rows: list[list[int]], top: int, corners: dict[int, tuple[int, int]], more: int
) -> Frame:
    """Find a location for each box of a frame whose upper edge is given."""
    for row, members in enumerate(rows):
        y = top + _TITLE + _MARGIN // 2 + row * (HEIGHT + _DOWN)
        corners.update((one, (_left(column), y)) for column, one in enumerate(members))
    across = max((len(row) for row in rows), default=1)
    width = 2 * _MARGIN + max(across, _FEWEST_ACROSS) * (WIDTH + _ACROSS) - _ACROSS
    inside = len(rows) * (HEIGHT + _DOWN) - (_DOWN if rows else 0)
    height = _TITLE + inside + (_MARGIN if rows else 0) + (_TITLE if more else 0)
    return Frame(key, _MARGIN, top, width, height, more)
