"""Each rule of a stage, violated: the fault, the node, its source line and its neighbours are in the error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx

import pygraph
from pygraph.errors import ProgramError
from pygraph.ir.descriptors import Argument, Mutation, PointerTable, Region, Result, Static, Stored, TensorSpec
from pygraph.ir.program import Program

aten = torch.ops.aten


@pytest.fixture
def program() -> Program:
    return pygraph.trace(lambda x: (torch.sin(x) + 1, None))(torch.ones(2))


def edited(program: Program, edit: Callable[[fx.Graph], None]) -> Program:
    module = program.copy_graph()
    edit(module.graph)
    return program.replace(module=module)


def node_of(graph: fx.Graph, target: object) -> fx.Node:
    return next(node for node in graph.nodes if node.target is target)


def check_fails(program: Program, text: str) -> str:
    with pytest.raises(ProgramError, match=text) as caught:
        pygraph.check_program(program)
    return str(caught.value)


def test_a_good_program_is_returned(program: Program) -> None:
    assert pygraph.check_program(program) is program


def test_inputs_and_placeholders_agree(program: Program) -> None:
    check_fails(program.replace(inputs=()), "1 placeholders for 0 inputs")


def test_an_input_is_legal_in_the_stage(program: Program) -> None:
    check_fails(program.replace(inputs=(PointerTable(()),)), "a PointerTable input is not legal in stage aten")


def test_outputs_and_results_agree(program: Program) -> None:
    check_fails(program.replace(outputs=(*program.outputs, Mutation(0))), "1 results for 2 outputs")


def test_an_output_is_legal_in_the_stage(program: Program) -> None:
    check_fails(program.replace(outputs=(Stored(0),)), "a Stored output is not legal in stage aten")
    check_fails(
        program.replace(outputs=(Mutation(0),), stage="kernels"), "a Mutation output is not legal in stage kern"
    )


def test_every_leaf_is_there_once(program: Program) -> None:
    check_fails(program.replace(statics=()), r"leaves \[0\] do not fill a tree of 2")
    twice = (*program.statics, Static("result[0]", 0, None))
    check_fails(program.replace(statics=twice), r"leaves \[0, 0, 1\] do not fill a tree of 2")
    hidden = tuple(dataclasses.replace(d, leaf=-1) if isinstance(d, Result) else d for d in program.outputs)
    check_fails(program.replace(outputs=hidden), r"leaves \[1\] do not fill")


def test_regions_only_in_their_stage(program: Program) -> None:
    check_fails(program.replace(regions=(Region(0, "graph", "patch"),)), "regions are not legal in stage aten")


def test_writing_in_place_is_not_functional(program: Program) -> None:
    def edit(graph: fx.Graph) -> None:
        node_of(graph, aten.sin.default).target = aten.sin_.default

    text = check_fails(edited(program, edit), "writing in place is not legal in stage aten")
    assert "From test_check.py:" in text
    assert "-> sin = aten.sin_.default" in text
    assert "   add = aten.add.Tensor" in text


def test_writing_in_place_is_legal_for_kernels(program: Program) -> None:
    def edit(graph: fx.Graph) -> None:
        node_of(graph, aten.sin.default).target = aten.sin_.default

    pygraph.check_program(edited(program, edit).replace(stage="kernels"))


def test_pointer_operations_need_a_table(program: Program) -> None:
    def edit(graph: fx.Graph) -> None:
        add = node_of(graph, aten.add.Tensor)
        add.target = torch.ops.pygraph.store.default

    check_fails(edited(program, edit), "pointer operations are not legal in stage aten")


def test_nodes_have_spec_and_source(program: Program) -> None:
    check_fails(
        edited(program, lambda graph: node_of(graph, aten.sin.default).meta.clear()), "it has no spec or source"
    )


def test_only_operations_and_host_arithmetic(program: Program) -> None:
    def edit(graph: fx.Graph) -> None:
        node_of(graph, aten.sin.default).target = dataclasses.replace

    check_fails(edited(program, edit), "neither an operation nor arithmetic on numbers")


def test_no_calls_of_methods(program: Program) -> None:
    def edit(graph: fx.Graph) -> None:
        sin = node_of(graph, aten.sin.default)
        with graph.inserting_after(sin):
            new = graph.call_method("sin", (sin.args[0],))
        new.meta = dict(sin.meta)
        sin.replace_all_uses_with(new)
        graph.erase_node(sin)

    check_fails(edited(program, edit), "a call_method node is not legal")


def test_attributes_are_functions_only(program: Program) -> None:
    def edit(graph: fx.Graph) -> None:
        graph.owning_module.register_buffer("weight", torch.ones(2))
        with graph.inserting_before(node_of(graph, aten.sin.default)):
            graph.get_attr("weight")

    check_fails(edited(program, edit), "only functions of higher-order operations are attributes")


def test_regions_cover_every_node(device: torch.device) -> None:
    program = pygraph.graphify(pygraph.trace(torch.sin)(torch.ones(2, device=device)))

    def edit(graph: fx.Graph) -> None:
        del node_of(graph, aten.sin.default).meta["region"]

    check_fails(edited(program, edit), "it belongs to no region")


def test_errors_say_after_which_pass(program: Program) -> None:
    broken = program.replace(inputs=(), history=("trace", "mine"))
    assert check_fails(broken, "placeholders").startswith("check_program(<lambda>, after mine): ")


def test_argument_descriptors_are_legal_everywhere() -> None:
    spec = TensorSpec.of(torch.ones(2))
    program = pygraph.trace(torch.sin)(torch.ones(2))
    assert program.inputs == (Argument("args[0]", 0, spec),)
