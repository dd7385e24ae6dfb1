"""Program, its descriptors and specs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import pygraph
from pygraph.ir.descriptors import Result, TensorSpec, contiguous_strides, tensor_specs
from pygraph.ir.program import output_values


@pytest.mark.parametrize(
    ("shape", "stride", "span"),
    [((), (), 1), ((3,), (1,), 3), ((2, 3), (3, 1), 6), ((2, 3), (1, 2), 6), ((2, 3), (10, 2), 15), ((4,), (0,), 1),
     ((0,), (1,), 0), ((3, 0), (7, 1), 0)],
)  # fmt: skip
def test_span_is_the_reach_of_the_strides(shape: tuple[int, ...], stride: tuple[int, ...], span: int) -> None:
    spec = TensorSpec(shape, stride, torch.float64, torch.device("cpu"))
    assert spec.span == span
    assert spec.nbytes == 8 * span
    assert spec.empty().untyped_storage().nbytes() == spec.nbytes


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (2, 0, 3), (0, 0), (1, 5, 1)])
def test_contiguous_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


def test_spec_describes_a_view() -> None:
    spec = TensorSpec.of(torch.empty(4, 6).t()[1:3])
    assert (spec.shape, spec.stride, spec.offset) == ((2, 4), (1, 6), 1)
    assert str(spec) == "float32[2, 4] strides (1, 6) cpu"
    assert str(TensorSpec.of(torch.empty(2, dtype=torch.int64))) == "int64[2] cpu"


def test_tensor_specs_are_found_inside_tuples() -> None:
    spec = TensorSpec.of(torch.empty(2))
    assert list(tensor_specs((spec, (int, spec), None))) == [spec, spec]


def test_a_program_is_frozen() -> None:
    program = pygraph.trace(torch.sin)(torch.ones(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.stage = "regions"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.inputs[0].path = "x"  # pyright: ignore[reportAttributeAccessIssue]


def test_copy_graph_leaves_the_original_alone() -> None:
    program = pygraph.trace(lambda x: torch.sin(x) + 1)(torch.ones(2))
    text = str(program)
    copy = program.copy_graph()
    for node in copy.graph.nodes:
        assert set(node.meta) == set(next(n for n in program.nodes if n.name == node.name).meta)
        node.meta["spec"] = None
        if node.op == "call_function":
            node.target = torch.ops.aten.cos.default
    assert str(program) == text


def test_replace_makes_another_program() -> None:
    program = pygraph.trace(torch.sin)(torch.ones(2))
    other = program.replace(history=("trace", "mine"))
    assert program.history == ("trace",)
    assert other.history == ("trace", "mine")
    assert other.module is program.module


def test_results_fit_outputs() -> None:
    program = pygraph.trace(lambda x: (x + 1, x * 2))(torch.ones(2))
    assert [node.target for node in program.results] == [torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor]
    assert list(program.results) == output_values(program.module.graph)
    assert [d.path for d in program.outputs if isinstance(d, Result)] == ["result[0]", "result[1]"]


def test_device_is_the_accelerator_if_there_is_one(device: torch.device) -> None:
    assert pygraph.trace(torch.sin)(torch.ones(2)).device == torch.device("cpu")
    mixed = pygraph.trace(lambda host, x: (host + 1, x + 1))(torch.ones(2), torch.ones(2, device=device))
    assert mixed.device == device


def test_table_appears_with_indirect(device: torch.device) -> None:
    program = pygraph.trace(torch.sin)(torch.ones(2, device=device))
    assert program.table is None
    table = pygraph.indirect(program).table
    assert table is not None
    assert [slot.role for slot in table.slots] == ["argument", "result"]
