"""indirect: arguments and results behind slots of a pointer table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pygraph
from pygraph.errors import StageError
from pygraph.ir.descriptors import Argument, Base, Captured, PointerTable, Result, ScalarArgument, Stored
from pygraph.ir.effects import is_load, is_store, is_work


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.arange(6.0, device=device).view(2, 3)


def test_device_arguments_and_results_get_slots(x: torch.Tensor) -> None:
    host = torch.ones(2)
    program = pygraph.indirect(pygraph.trace(lambda x, k, host: (x * k, host + 1, x.sum()))(x, 2.0, host))
    table, *others = program.inputs
    assert isinstance(table, PointerTable)
    assert [(slot.role, slot.of.path) for slot in table.slots] == [
        ("argument", "args[0]"),
        ("result", "result[0]"),
        ("result", "result[2]"),
    ]
    assert [type(d) for d in others] == [ScalarArgument, Argument]
    assert [type(d) for d in program.outputs] == [Stored, Result, Stored]
    assert program.stage == "pointers"
    assert [node for node in program.nodes if is_load(node)]
    assert sum(is_store(node) for node in program.nodes) == 2


def test_captured_tensors_keep_their_addresses(x: torch.Tensor) -> None:
    layer = nn.Linear(3, 3).to(x.device)
    with torch.no_grad():
        program = pygraph.indirect(pygraph.trace(layer)(x))
    assert [d.name for d in program.inputs if isinstance(d, Captured)] == ["weight", "bias"]


def test_overlapping_arguments_share_a_slot(x: torch.Tensor) -> None:
    memory = torch.zeros(8, device=x.device)
    program = pygraph.indirect(pygraph.trace(lambda a, b: (a.add_(1), b * 2)[1])(memory[1:5], memory[2:6]))
    assert program.table is not None
    assert isinstance(program.table.slots[0].of, Base)
    assert pygraph.evaluate(program, memory[1:5], memory[2:6]).tolist() == [2.0, 2.0, 2.0, 0.0]
    assert memory.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_it_reads_and_writes_real_addresses(x: torch.Tensor) -> None:
    program = pygraph.indirect(pygraph.trace(lambda x: x.t() * 2)(x))
    out = torch.empty(3, 2, device=x.device)
    table = torch.tensor([x.data_ptr(), out.data_ptr()])
    assert list(program.module(table)) == [None]
    assert torch.equal(out.view(-1), (x.t() * 2).as_strided((6,), (1,)))


def test_aliases_and_updates_survive(x: torch.Tensor) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(1)
        y = x * 2
        return x, x[0], y, y[1]

    program = pygraph.indirect(pygraph.trace(fn)(x.clone()))
    mine, eager = x.clone(), x.clone()
    same, row, y, y1 = pygraph.evaluate(program, mine)
    for got, expected in zip((same, row, y, y1), fn(eager), strict=True):
        assert torch.equal(got, expected)
    assert same is mine
    assert row.data_ptr() == mine.data_ptr()
    assert y1.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def test_host_programs_only_change_their_stage() -> None:
    program = pygraph.indirect(pygraph.trace(torch.sin)(torch.ones(2)))
    assert program.stage == "pointers"
    assert program.table is None


def test_twice_is_refused(x: torch.Tensor) -> None:
    program = pygraph.indirect(pygraph.trace(torch.sin)(x))
    with pytest.raises(StageError, match=r"before graphify: graphify\(indirect\(devicify\(f\)\)\)"):
        pygraph.indirect(program)


def test_loads_views_and_stores_are_no_work(x: torch.Tensor) -> None:
    program = pygraph.indirect(pygraph.trace(lambda x: torch.sin(x.t()))(x))
    assert [node.target for node in program.nodes if is_work(node)] == [torch.ops.aten.sin.default]
