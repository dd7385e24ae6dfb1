"""Outlines: nodes, edges and regions of Programs as plain data."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import pygraph
from pygraph.ir.outline import blocks, outline

X = torch.ones(2, 3)


def cut(device: torch.device) -> pygraph.Program:
    """A Program of three regions, of which the second one needs the host."""

    def fn(x: torch.Tensor, k: float) -> dict[str, torch.Tensor]:
        y = torch.relu(x * k)
        return {"a": y.t() + y[y > 0].sum(), "b": y}

    trace = pygraph.trace(fn)(X.to(device), 2.0)
    return pygraph.graphify(pygraph.indirect(pygraph.devicify(trace)))


def test_nodes_have_the_names_and_lines_of_the_text() -> None:
    program = pygraph.trace(lambda x, w: torch.relu(x @ w) + x.sum())(X, X.t())
    lines = [line.strip() for line in str(program).splitlines()]
    for node in outline(program).nodes:
        assert any(line.startswith(f"{node.name}:") for line in lines)
        if node.kind != "input":
            assert node.text in lines
            assert node.source is not None
            assert node.source.startswith("test_outline.py:")


def test_edges_are_those_of_the_graph() -> None:
    program = pygraph.trace(lambda x, w: torch.relu(x @ w) + x.sum())(X, X.t())
    found = outline(program)
    names = [node.name for node in found.nodes]
    edges = {node.label: [found.nodes[one].label for one in node.arguments] for node in found.nodes}
    assert edges == {
        "args[0]": [], "args[1]": [], "mm": ["args[0]", "args[1]"], "relu": ["mm"], "sum": ["args[0]"],
        "add": ["relu", "sum"],
    }  # fmt: skip
    (output,) = found.outputs
    assert (output.label, output.spec, output.node) == ("result", "float32[2, 2] cpu", names.index("add"))


def test_kinds_of_nodes(device: torch.device) -> None:
    found = outline(cut(device))
    kinds = {node.label: node.kind for node in found.nodes}
    assert kinds["pointer table"] == kinds["args[1], live"] == "input"
    assert kinds["load args[0]"] == "load"
    assert kinds["store result['a']"] == "store"
    assert kinds["t"] == "view"
    assert kinds["relu"] == kinds["index"] == "work"
    number = pygraph.trace(lambda x, k: x * (k + 1))(X, 2.0)
    assert {node.label: node.kind for node in outline(number).nodes}["add"] == "host"


def test_regions_stand_together(device: torch.device) -> None:
    program = cut(device)
    found = outline(program)
    groups = blocks(found.nodes)
    assert [key for key, _ in groups] == ["inputs", 0, 1, 2]
    assert found.regions == program.regions
    assert [found.nodes[one].label for one in dict(groups)[1]] == ["index", "sum"]
    labels = [(output.label, found.nodes[output.node or 0].label) for output in found.outputs]
    assert labels == [("result['a']", "store result['a']"), ("result['b']", "store result['b']")]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_what_is_left_out_is_counted(most: int) -> None:
    def fn(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [x + 1 for x in xs]

    found = outline(pygraph.trace(fn)(*[X + number for number in range(6)]), most)
    inputs = [node for node in found.nodes if node.kind == "input"]
    assert len(inputs) + found.more["inputs"] == 6
    assert len(found.nodes) - len(inputs) == most
    assert found.more[None] == 6 - most
    assert len(found.outputs) + found.more["outputs"] == 6
    assert all(one < len(found.nodes) for node in found.nodes for one in node.arguments)


def test_nothing_of_the_program_is_held() -> None:
    weight = torch.ones(3)
    program = pygraph.trace(lambda x: x * weight)(X)
    found = outline(program)
    gone = weakref.ref(program), weakref.ref(program.module)
    del program
    gc.collect()
    assert [one() for one in gone] == [None, None]
    assert [node.label for node in found.nodes] == ["args[0]", "closed-over weight", "mul"]


def test_every_region_has_a_share(device: torch.device) -> None:
    """One long region does not leave others without nodes, nor do inputs of what is left out."""

    def fn(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.sin(x) * weight
        return torch.cos(x) + x[x > 0].sum()

    weights = [X.to(device) + number for number in range(40)]
    program = pygraph.graphify(pygraph.trace(fn)(X.to(device), *weights))
    sizes = [sum(node.meta.get("region") == region.index for node in program.nodes) for region in program.regions]
    assert len(sizes) == 3
    found = outline(program, 20)
    shown = [sum(node.region == region.index for node in found.nodes) for region in program.regions]
    assert shown[1:] == sizes[1:], "short regions are whole"
    assert sum(shown) == 20
    assert found.more[0] == sizes[0] - shown[0]
    taken = {one for node in found.nodes for one in node.arguments}
    inputs = [position for position, node in enumerate(found.nodes) if node.kind == "input"]
    assert len(inputs) == 10
    assert found.more["inputs"] == 31
    assert len(taken & set(inputs)) >= 7, "those that are shown are taken by what is shown"
