"""Differences between Programs: nothing but what a pass has changed, under names that stay."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import fx

import pygraph
from pygraph.errors import ArgumentError

X = torch.ones(2, 3)


def fn(x: torch.Tensor, w: torch.Tensor, k: float) -> dict[str, torch.Tensor]:
    y = torch.relu(x @ w * k)
    return {"a": y + y.sum().item(), "b": torch.sin(y) * 2}


def stages(device: torch.device) -> list[pygraph.Program]:
    found = [pygraph.trace(fn)(X.to(device), X.t().to(device), 2.0)]
    for one in (pygraph.devicify, pygraph.indirect, pygraph.graphify):
        found.append(one(found[-1]))
    return found


def edited(program: pygraph.Program, edit: Any) -> pygraph.Program:
    module = program.copy_graph()
    edit(module.graph)
    return program.replace(module=module)


def find(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.op == "call_function" and name in str(node.target))


def changed_lines(found: pygraph.ProgramDiff) -> list[str]:
    return [line for line in found.lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_a_program_and_itself() -> None:
    program = pygraph.trace(fn)(X, X.t(), 2.0)
    for other in (program, program.replace(module=program.copy_graph()), pygraph.trace(fn)(X, X.t(), 2.0)):
        found = pygraph.diff(program, other)
        assert not found
        assert str(found) == "nodes: 11 the same\nno differences"
        assert (found.added, found.removed, found.changed, found.moved) == ({}, {}, {}, {})


def test_an_inserted_node_renames_no_other() -> None:
    """The operation is one that occurs later on, too, so that a Program's own text numbers it anew."""
    program = pygraph.trace(lambda x: torch.sin(torch.sin(x) + 1) * 2)(X)

    def insert(graph: fx.Graph) -> None:
        first = find(graph, "sin")
        with graph.inserting_before(first):
            new = graph.call_function(torch.ops.aten.sin.default, first.args)
            new.meta = dict(first.meta)
        first.args = (new,)

    found = pygraph.diff(program, edited(program, insert))
    assert (found.added, found.removed, found.changed, found.moved) == ({"sin": 1}, {}, {"add": 1}, {})
    assert found.same == 4
    assert [re.sub("  #.*", "", line) for line in changed_lines(found)] == [
        '-    add: "float32[2, 3] cpu" = aten.add.Tensor(sin, 1)',
        '+    sin_2: "float32[2, 3] cpu" = aten.sin.default(sin)',
        '+    add: "float32[2, 3] cpu" = aten.add.Tensor(sin_2, 1)',
    ]


def test_a_removed_node() -> None:
    program = pygraph.trace(lambda x: torch.cos(torch.relu(torch.sin(x))))(X)

    def remove(graph: fx.Graph) -> None:
        node = find(graph, "relu")
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    found = pygraph.diff(program, edited(program, remove))
    assert (found.added, found.removed, found.changed) == ({}, {"relu": 1}, {"cos": 1})
    assert [line[:9] for line in changed_lines(found)] == ["-    relu", "-    cos:", "+    cos:"]


def test_a_changed_argument_is_one_change() -> None:
    before, after = (pygraph.trace(lambda x, n=n: torch.relu(torch.sin(x) * n) + 1)(X) for n in (2, 3))
    found = pygraph.diff(before, after)
    assert found.changed == {"mul": 1}
    assert found.same == 4
    assert len(changed_lines(found)) == 2


def test_moved_nodes_are_the_fewest() -> None:
    program = pygraph.trace(lambda x: [torch.sin(x), torch.cos(x), torch.tan(x), torch.exp(x)])(X)

    def move(graph: fx.Graph) -> None:
        find(graph, "exp").append(find(graph, "sin"))

    found = pygraph.diff(program, edited(program, move))
    assert found.moved == {"sin": 1}
    assert found.same == 5
    assert len(changed_lines(found)) == 2


def test_passes_are_shown_by_what_they_do(device: torch.device) -> None:
    traced, devicified, indirect, graphified = stages(device)
    found = pygraph.diff(traced, devicified)
    assert found.added == {"scalar": 1}
    assert found.removed == {"_local_scalar_dense": 1}
    assert found.changed == {"add": 1, "mul": 1}
    found = pygraph.diff(devicified, indirect)
    assert found.added == {"store": 2, "input": 1}
    assert found.changed == {"load": 2}, "arguments are loaded now"
    assert not found.removed
    text = str(found)
    assert '+    args_0: "float32[2, 3] emu" = pygraph_ops.load' in text.replace(device.type, "emu")
    assert "-    mm:" not in text, "what reads an argument reads the same name"
    found = pygraph.diff(indirect, graphified)
    assert (found.added, found.removed, found.changed) == ({}, {}, {})
    assert "+    # region 0" in found.lines
    assert set(pygraph.diff(graphified, traced).removed) == {"store", "scalar", "input"}


def test_counts_add_up(device: torch.device) -> None:
    every = stages(device)
    for before in every:
        for after in every:
            found = pygraph.diff(before, after)
            sizes = [sum(node.op in ("placeholder", "call_function") for node in one.nodes) for one in (before, after)]
            pairs = found.same + sum(found.changed.values())
            assert [pairs + sum(found.removed.values()), pairs + sum(found.added.values())] == sizes
            assert bool(found) == (before is not after)


def test_a_change_at_the_top_of_a_long_chain_is_one_change() -> None:
    def chain(x: torch.Tensor, first: str) -> torch.Tensor:
        x = getattr(torch, first)(x)
        for _ in range(2500):
            x = torch.sin(x)
        return x

    found = pygraph.diff(*(pygraph.trace(chain)(X, first) for first in ("cos", "tan")))
    assert (found.added, found.removed, found.changed, found.same) == ({"tan": 1}, {"cos": 1}, {"sin": 1}, 2500)


def test_different_functions_have_little_in_common() -> None:
    found = pygraph.diff(pygraph.trace(lambda x: torch.sin(x) + 1)(X), pygraph.trace(lambda y: torch.cos(y[0]) * 2)(X))
    assert found.added == {"cos": 1, "mul": 1, "select": 1}
    assert found.removed == {"add": 1, "sin": 1}
    assert found.same == 1


def test_functions_of_higher_order_operations_keep_their_names() -> None:
    def choosing(n: int) -> pygraph.Program:
        return pygraph.trace(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) + n)(X)

    before, after = choosing(1), choosing(2)
    assert not pygraph.diff(before, choosing(1))
    found = pygraph.diff(before, after)
    assert (found.added, found.removed, found.changed) == ({}, {}, {"add": 1})
    assert len(changed_lines(found)) == 2


def test_it_is_the_same_every_time(device: torch.device) -> None:
    assert len({str(pygraph.diff(stages(device)[0], stages(device)[2])) for _ in range(3)}) == 1


def test_programs_of_thousands_of_nodes_that_are_alike() -> None:
    def chain(x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = torch.sin(x)
        return x

    found = pygraph.diff(pygraph.trace(chain)(X, 1000), pygraph.trace(chain)(X, 1001))
    assert (found.added, found.removed, found.changed, found.same) == ({"sin": 1}, {}, {}, 1001)


def test_notebooks_get_escaped_text() -> None:
    before = pygraph.trace(lambda d: d["<b>"] + 1)({"<b>": X})
    shown = pygraph.diff(before, pygraph.trace(lambda d: d["<b>"] + 2)({"<b>": X}))._repr_html_()
    assert "['<b>']" not in shown
    assert "&lt;b&gt;" in shown
    assert shown.count("<span style=") == 5  # the two Programs, where, the old line, the new one
    assert "no differences" in pygraph.diff(before, before)._repr_html_()


@pytest.mark.parametrize("name", ["before", "after"])
def test_what_is_no_program_is_refused(name: str) -> None:
    program: Any = pygraph.trace(torch.sin)(X)
    arguments: dict[str, Any] = {"before": program, "after": program, name: fn}
    with pytest.raises(ArgumentError, match=rf"diff\(…, {name}=fn\): not a Program; .* Take trace"):
        pygraph.diff(**arguments)
