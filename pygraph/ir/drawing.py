"""Pictures of Programs, as SVG and in the language of Graphviz; nothing has to be installed for either."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from xml.etree import ElementTree

from pygraph.errors import ArgumentError, describe
from pygraph.ir.descriptors import Region
from pygraph.ir.layout import HEIGHT, WIDTH, Frame, layout
from pygraph.ir.outline import Outline, OutlineNode, blocks

_STYLE = """
.pg-draw { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.pg-draw text { fill: #1f2328; }
.pg-draw .pg-paper { fill: #ffffff; }
.pg-draw .pg-frame { fill: #f6f8fa; stroke: #d0d7de; }
.pg-draw .pg-frame-graph { fill: #eef6ee; stroke: #4a9a5a; }
.pg-draw .pg-frame-eager { fill: #fdf3e7; stroke: #c77d1e; }
.pg-draw .pg-title { font-weight: 600; }
.pg-draw .pg-node { fill: #ffffff; stroke: #57606a; }
.pg-draw .pg-input, .pg-draw .pg-load { fill: #e3effb; stroke: #3a78b5; }
.pg-draw .pg-output, .pg-draw .pg-store { fill: #efe8fa; stroke: #7d57b8; }
.pg-draw .pg-view { stroke-dasharray: 4 3; }
.pg-draw .pg-host { fill: #fbe9c8; stroke: #a8691a; }
.pg-draw text.pg-spec { fill: #59636e; font-size: 10.5px; }
.pg-draw .pg-edge { fill: none; stroke-linejoin: round; stroke: #8c959f; stroke-opacity: 0.75; }
.pg-draw .pg-tip { fill: #8c959f; }
@media (prefers-color-scheme: dark) {
  .pg-draw text { fill: #e6edf3; }
  .pg-draw .pg-paper { fill: #0d1117; }
  .pg-draw .pg-frame { fill: #161b22; stroke: #3d444d; }
  .pg-draw .pg-frame-graph { fill: #12221a; stroke: #3f8a52; }
  .pg-draw .pg-frame-eager { fill: #2a1f10; stroke: #b3752a; }
  .pg-draw .pg-node { fill: #21262d; stroke: #8b949e; }
  .pg-draw .pg-input, .pg-draw .pg-load { fill: #14283d; stroke: #5a9bd8; }
  .pg-draw .pg-output, .pg-draw .pg-store { fill: #261c3b; stroke: #a487dd; }
  .pg-draw .pg-host { fill: #38280c; stroke: #d29a3f; }
  .pg-draw text.pg-spec { fill: #9198a1; }
}
"""

_SUFFIXES = (".svg", ".dot", ".gv")


@dataclasses.dataclass(frozen=True, repr=False)
class Drawing:
    """A picture of a Program: boxes for nodes, in frames for inputs, regions and outputs, and lines for values.

    Notebooks show it. ``str()`` is its text in the language of Graphviz.

    Attributes:
        outline: The Program as plain data.

    Example:
        >>> import torch, pygraph
        >>> drawing = pygraph.trace(lambda x: torch.sin(x) + 1)(torch.ones(2)).draw()
        >>> drawing.svg.startswith("<svg")
        True
        >>> print(drawing.dot)  # doctest: +ELLIPSIS
        digraph "<lambda>" {
          ...
          n0 -> n1;
          n1 -> n2;
          n2 -> r0;
        }
    """

    outline: Outline

    @property
    def svg(self) -> str:
        """The picture as SVG, with a style for light and one for dark surroundings."""
        return ElementTree.tostring(_Svg(self.outline).root, encoding="unicode")

    @property
    def dot(self) -> str:
        """The picture in the language of Graphviz, which lays it out."""
        return _dot(self.outline)

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.dot

    def __repr__(self) -> str:
        return f"<Drawing of {self.outline.name}: {len(self.outline.nodes)} nodes>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file.

        Args:
            path: A file that ends in ``.svg``, or in ``.dot`` or ``.gv`` for the language of Graphviz.

        Raises:
            ArgumentError: It ends otherwise.
        """
        file = Path(path)
        suffix = file.suffix.lower()
        if suffix not in _SUFFIXES:
            expected = "a name that ends in " + ", ".join(_SUFFIXES)
            raise ArgumentError(
                describe(f"draw().save({os.fspath(path)!r})", "unknown kind of file", expected=expected)
            )
        file.write_text(self.svg if suffix == ".svg" else self.dot, encoding="utf-8")


def region_title(region: Region) -> str:
    """A region's way of running in words.

    >>> region_title(Region(1, "eager", "launch", reason="it needs a value on the host"))
    'region 1: launched node by node, as it needs a value on the host'
    """
    ways = {"launch": "launched node by node", "patch": "a graph with patched pointers", "copy": "a graph with copies"}
    way = "on the host" if region.kind == "host" else ways[region.way]
    if region.kind == "graph" and region.way == "launch":
        way += ", though it can be a graph"
    return f"region {region.index}: {way}" + (f", as {region.reason}" if region.reason else "")


# ---- SVG -------------------------------------------------------------------------------------------------------


class _Svg:
    """The picture of an outline as a tree of elements, which escapes all text when it is written."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._layout = found = layout(outline)
        size = {"width": str(found.width), "height": str(found.height)}
        self.root = ElementTree.Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {found.width} {found.height}", **size,
                    "class": "pg-draw", "role": "img", "aria-label": _clean(f"the Program {outline.name}")},
        )  # fmt: skip
        self._add(self.root, "style", {}, _STYLE)
        self._add(self.root, "rect", {"class": "pg-paper", **size})
        for frame in found.frames:
            self._frame(frame)
        self._edges()
        for node, corner in zip(outline.nodes, found.nodes, strict=True):
            self._box(corner, node.kind, node.label, node.spec, _hint(node))
        for output, corner in zip(outline.outputs, found.outputs, strict=True):
            self._box(corner, "output", output.label, output.spec, f"{output.label}: {output.spec}")

    def _add(
        self, parent: ElementTree.Element, tag: str, attributes: dict[str, str], text: str | None = None
    ) -> ElementTree.Element:
        made = ElementTree.SubElement(parent, tag, attributes)
        made.text = None if text is None else _clean(text)
        return made

    def _frame(self, frame: Frame) -> None:
        region = _region(self._outline, frame.key)
        kind = "" if region is None else f" pg-frame-{region.kind}"
        group = self._add(self.root, "g", {})
        self._add(
            group, "rect",
            {"class": f"pg-frame{kind}", "rx": "8", "x": str(frame.x), "y": str(frame.y), "width": str(frame.width),
             "height": str(frame.height)},
        )  # fmt: skip
        title = _title(self._outline, frame.key)
        self._add(group, "title", {}, title)
        line = {"class": "pg-title", "x": str(frame.x + 12), "y": str(frame.y + 19)}
        self._add(group, "text", line, _cut(title, (frame.width - 24) / 7.3))
        if frame.more:
            line = {"x": str(frame.x + 16), "y": str(frame.y + frame.height - 10)}
            self._add(group, "text", line, f"… {frame.more} more")

    def _box(self, corner: tuple[int, int], kind: str, label: str, spec: str, hint: str) -> None:
        x, y = corner
        group = self._add(self.root, "g", {})
        self._add(group, "title", {}, hint)
        size = {"x": str(x), "y": str(y), "width": str(WIDTH), "height": str(HEIGHT)}
        self._add(group, "rect", {"class": f"pg-node pg-{kind}", "rx": "5", **size})
        self._add(group, "text", {"x": str(x + 9), "y": str(y + 18)}, _cut(label, (WIDTH - 18) / 7.3))
        line = {"class": "pg-spec", "x": str(x + 9), "y": str(y + 34)}
        shape, _, strides = spec.partition(" strides")
        self._add(group, "text", line, _cut(shape + " strided" * bool(strides), (WIDTH - 18) / 6.4))

    def _edges(self) -> None:
        found = self._layout
        pairs = [
            (one, corner)
            for node, corner in zip(self._outline.nodes, found.nodes, strict=True)
            for one in dict.fromkeys(node.arguments)
        ]
        outputs = zip(self._outline.outputs, found.outputs, strict=True)
        pairs += [(output.node, corner) for output, corner in outputs if output.node is not None]
        tops = sorted({y for _, y in (*found.nodes, *found.outputs)})
        rows = {y: row for row, y in enumerate(tops)}
        for one, (x, y) in pairs:
            left, top = found.nodes[one]
            is_next = rows[y] == rows[top] + 1
            line, tip = _curve(left, top, x, y) if is_next else _detour(one, left, top, x, y)
            self._add(self.root, "path", {"class": "pg-edge", "d": line})
            self._add(self.root, "path", {"class": "pg-tip", "d": tip})


def _curve(left: int, top: int, x: int, y: int) -> tuple[str, str]:
    """The line from one box to another in the next row, and its tip."""
    begin, start, end = left + WIDTH // 2, top + HEIGHT, x + WIDTH // 2
    bend = max((y - start) // 2, 12)
    line = f"M {begin} {start} C {begin} {start + bend}, {end} {y - bend}, {end} {y - 5}"
    return line, f"M {end} {y} l -4 -6 l 8 0 z"


def _detour(number: int, left: int, top: int, x: int, y: int) -> tuple[str, str]:
    """The line from a box to one further down, beside all boxes that are between, and its tip."""
    shift = 3 * (number % 5)  # lines from different boxes do not cover each other
    begin, below, beside, end = left + WIDTH - 12 - shift, top + HEIGHT + 5 + shift, x + WIDTH + 5 + shift, x + WIDTH
    middle = y + HEIGHT // 2 - 6 + shift
    line = f"M {begin} {top + HEIGHT} V {below} H {beside} V {middle} H {end + 5}"
    return line, f"M {end} {middle} l 6 -4 l 0 8 z"


def _region(outline: Outline, key: int | str | None) -> Region | None:
    return outline.regions[key] if isinstance(key, int) and key < len(outline.regions) else None


def _title(outline: Outline, key: int | str | None) -> str:
    region = _region(outline, key)
    return region_title(region) if region is not None else key if isinstance(key, str) else "operations"


def _hint(node: OutlineNode) -> str:
    """The text that a browser shows for a box."""
    recorded = f"recorded as {', '.join(node.kernels)}" if node.kernels else ""
    time = f"{node.us:,.1f} µs" if node.us is not None else ""
    return "\n".join(filter(None, [node.text, recorded, node.pointers, time]))


def _cut(text: str, most: float) -> str:
    """A text that fits, with its begin and its end."""
    if len(text) <= most:
        return text
    end = int(most) // 2
    return f"{text[: int(most) - end - 1]}…{text[-end:]}"


def _clean(text: str) -> str:
    """A text without the characters that XML cannot hold."""
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)


# ---- Graphviz --------------------------------------------------------------------------------------------------


def _dot(outline: Outline) -> str:
    lines = [f"digraph {_quoted(outline.name)} {{", "  node [shape=box, fontname=monospace];"]
    groups = blocks(outline.nodes)
    keys = [key for key, _ in groups]
    groups += [(key, []) for key in outline.more if key not in keys and key != "outputs"]
    for number, (key, members) in enumerate(groups):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(_title(outline, key))};"]
        for one in members:
            node = outline.nodes[one]
            look = {"view": ", style=dashed", "input": ", shape=ellipse"}.get(node.kind, "")
            lines.append(f"    n{one} [label={_quoted(node.label, node.spec)}{look}];")
        lines += ["  " + line for line in _more(f"more_{number}", outline.more.get(key, 0))]
        lines.append("  }")
    for number, output in enumerate(outline.outputs):
        lines.append(f"  r{number} [label={_quoted(output.label, output.spec)}, shape=ellipse];")
    lines += _more("more_outputs", outline.more.get("outputs", 0))
    for one, node in enumerate(outline.nodes):
        lines += [f"  n{argument} -> n{one};" for argument in dict.fromkeys(node.arguments)]
    lines += [f"  n{one.node} -> r{number};" for number, one in enumerate(outline.outputs) if one.node is not None]
    return "\n".join([*lines, "}"])


def _more(name: str, count: int) -> list[str]:
    return [f"  {name} [label={_quoted(f'… {count} more')}, shape=plaintext];"] if count else []


def _quoted(*lines: str) -> str:
    escaped = (_clean(line).replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for line in lines)
    return '"' + "\\n".join(escaped) + '"'
