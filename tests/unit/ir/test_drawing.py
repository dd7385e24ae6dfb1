"""Pictures of Programs: well-formed, complete, escaped, and nothing on top of anything else."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import pygraph
from pygraph.errors import ArgumentError
from pygraph.ir.drawing import Drawing, region_title
from pygraph.ir.layout import HEIGHT, WIDTH, layout
from pygraph.ir.outline import outline

SVG = "{http://www.w3.org/2000/svg}"
X = torch.ones(2, 3)


def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    halves = [torch.relu(x * number) for number in range(9)]
    return torch.stack(halves).sum(0) + halves[0], halves[-1].t()


def wide(device: torch.device) -> pygraph.Program:
    return pygraph.graphify(pygraph.indirect(pygraph.trace(model)(X.to(device))))


def texts(drawing: Drawing) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(drawing.svg).iter(f"{SVG}text")]


def test_every_node_and_edge_is_drawn(device: torch.device) -> None:
    drawing = wide(device).draw()
    root = ElementTree.fromstring(drawing.svg)
    boxes = [one for one in root.iter(f"{SVG}rect") if "pg-node" in one.get("class", "")]
    edges = [one for one in root.iter(f"{SVG}path") if one.get("class") == "pg-edge"]
    found = drawing.outline
    assert len(boxes) == len(found.nodes) + len(found.outputs)
    assert len(edges) == sum(len(set(node.arguments)) for node in found.nodes) + len(found.outputs)
    assert {"inputs", "outputs", "region 0: a graph with patched pointers"} <= set(texts(drawing))
    hints = "".join(one.text or "" for one in root.iter(f"{SVG}title"))
    for node in found.nodes:
        assert node.text in hints


def test_boxes_are_apart_and_inside_of_their_frames(device: torch.device) -> None:
    found = layout(outline(wide(device)))
    boxes = [*found.nodes, *found.outputs]
    for (x, y), (other_x, other_y) in combinations(boxes, 2):
        assert abs(x - other_x) >= WIDTH or abs(y - other_y) >= HEIGHT
    for x, y in boxes:
        inside = [
            f for f in found.frames
            if f.x < x and f.y < y and x + WIDTH < f.x + f.width and y + HEIGHT <= f.y + f.height
        ]  # fmt: skip
        assert len(inside) == 1
    for frame, below in pairwise(found.frames):
        assert frame.y + frame.height < below.y
    assert found.frames[-1].y + found.frames[-1].height < found.height
    assert all(frame.x + frame.width < found.width for frame in found.frames)


def test_values_go_down(device: torch.device) -> None:
    drawn = outline(wide(device))
    found = layout(drawn)
    for node, (_, y) in zip(drawn.nodes, found.nodes, strict=True):
        assert all(found.nodes[one][1] + HEIGHT < y for one in node.arguments)


def test_lines_that_pass_rows_are_beside_the_boxes() -> None:
    drawing = pygraph.trace(lambda x: torch.sin(torch.sin(torch.sin(x))) + x)(X).draw()
    found = layout(drawing.outline)
    (detour,) = [line for line in re.findall(r'class="pg-edge" d="([^"]+)"', drawing.svg) if "H" in line]
    across = int(re.findall(r"H (\d+)", detour)[0])
    assert all(across > x + WIDTH for x, _ in found.nodes)


def test_text_is_escaped(tmp_path: Path) -> None:
    name = '<script>alert("&")</script>\x00'
    program = pygraph.trace(lambda d: d[name] + 1)({name: X}).replace(name=name)
    drawing = program.draw()
    assert "<script" not in drawing.svg
    assert "alert" in ElementTree.fromstring(drawing.svg).get("aria-label", "")
    assert any(text.startswith("args[0]['<") for text in texts(drawing))
    assert '\\"' in drawing.dot
    assert "\x00" not in drawing.svg + drawing.dot
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"', drawing.dot):
        assert "\n" not in match[0]


def test_a_program_of_thousands_of_nodes_is_drawn_in_part() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1500):
            x = torch.sin(x)
        return x

    program = pygraph.trace(chain)(X)
    assert "… 1300 more" in texts(program.draw())
    assert "… 1300 more" in program.draw().dot
    assert "… 1490 more" in texts(program.draw(10))
    assert len(program.draw(2000).outline.nodes) == 1501


def test_the_same_program_is_the_same_picture(device: torch.device) -> None:
    assert wide(device).draw().svg == wide(device).draw().svg
    assert wide(device).draw().dot == wide(device).draw().dot


def test_files(tmp_path: Path) -> None:
    drawing = pygraph.trace(lambda x: x + 1)(X).draw()
    for suffix, text in ((".svg", drawing.svg), (".dot", drawing.dot), (".GV", drawing.dot)):
        drawing.save(tmp_path / f"picture{suffix}")
        assert (tmp_path / f"picture{suffix}").read_text(encoding="utf-8") == text
    with pytest.raises(ArgumentError, match=r"draw\(\)\.save\('.*picture.png'\).*\.svg, \.dot"):
        drawing.save(str(tmp_path / "picture.png"))
    assert drawing._repr_svg_() == drawing.svg
    assert str(drawing) == drawing.dot


def test_nothing_at_all_is_drawn_too() -> None:
    drawing = pygraph.trace(lambda: None)().draw()
    assert texts(drawing) == []
    assert drawing.dot.startswith('digraph "<lambda>" {')


def test_titles_say_how_regions_run(device: torch.device) -> None:
    program = pygraph.graphify(pygraph.trace(lambda x: x * x.sum().item())(X.to(device)))
    titles = [region_title(region) for region in program.regions]
    assert titles[0] == "region 0: a graph with copies"
    assert titles[1].startswith("region 1: launched node by node, as it needs a value on the host")
    hints = {one.text for one in ElementTree.fromstring(program.draw().svg).iter(f"{SVG}title")}
    assert set(titles) <= hints
