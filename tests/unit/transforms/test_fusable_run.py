"""Runs that Inductor compiles: their inputs, results and updates. No GPU is needed, as nothing is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import nll_loss

import pygraph
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.effects import is_work
from pygraph.ir.program import Program
from pygraph.transforms.fusable_run import FusableRun
from pygraph.transforms.fuse import _is_fusable


def program_on_cuda(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Program:
    """The Program of a function of tensors, as if they were on a GPU."""
    tensors = [torch.ones(shape, device=pygraph.default_device()) for shape in shapes]
    program = pygraph.trace(fn)(*tensors)
    module = program.copy_graph()
    for node in module.graph.nodes:
        if "spec" in node.meta:
            node.meta["spec"] = _on_cuda(node.meta["spec"])
    return program.replace(module=module)


def _on_cuda(spec: Any) -> Any:
    if isinstance(spec, TensorSpec):
        return dataclasses.replace(spec, device=torch.device("cuda", 0))
    return tuple(map(_on_cuda, spec)) if isinstance(spec, tuple) else spec


def run_of(program: Program, *names: str, before: tuple[str, ...] = ()) -> FusableRun:
    """The run of the nodes that call operations of these names."""
    nodes = [node for node in program.nodes if node.name in names]
    assert len(nodes) == len(names)
    return FusableRun(program, nodes, {node for node in program.nodes if node.name in before})


def operations(run: FusableRun) -> list[str]:
    return [node.target.__name__ for node in run.module.graph.nodes if node.op == "call_function"]


def test_nodes_outside_are_inputs_and_nodes_needed_outside_are_results() -> None:
    program = program_on_cuda(lambda x, y: (x.sin() * y).exp().cos(), (3,), (3,))
    run = run_of(program, "mul", "exp")
    assert [node.name for node in run.inputs] == ["sin", program.placeholders[1].name]
    assert [node.name for node in run.outputs] == ["exp"]
    assert run.specs == [node.meta["spec"] for node in run.inputs]


def test_views_are_made_inside() -> None:
    program = program_on_cuda(lambda x: x.t().sin() + x.t(), (2, 3))
    run = run_of(program, "sin", "add")
    assert run.inputs == program.placeholders
    assert operations(run).count("t.default") >= 1
    assert operations(run)[-1] == "add.Tensor"


def test_an_update_whose_value_is_computed_is_part_of_the_run() -> None:
    program = program_on_cuda(lambda x, y: x.mul_(y).sum(), (3,), (3,))
    run = run_of(program, "mul", "sum_1")
    assert [program.outputs[position].input for position in run.updates] == [0]
    assert operations(run) == ["mul.Tensor", "sum.default", "copy_.default"]
    assert [node.name for node in run.outputs] == ["sum_1"]


def test_an_update_waits_for_readers_of_the_old_contents() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        old = x.sin()
        x.mul_(y)
        return old

    program = program_on_cuda(fn, (3,), (3,))
    later, earlier = run_of(program, "mul"), run_of(program, "mul", before=("sin",))
    assert (later.updates, operations(later)) == ((), ["mul.Tensor"])
    assert [node.name for node in later.outputs] == ["mul"]
    assert operations(earlier) == ["mul.Tensor", "copy_.default"]


def test_new_contents_of_an_input_are_read_there() -> None:
    """An update that nodes outside read is written once: they read the memory of the input."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.logit(x.add_(y))

    run = run_of(program_on_cuda(fn, (3,), (3,)), "add")
    assert [(node.name, target) for node, target in run.updated.items()] == [("add", run.inputs[0])]
    assert not run.outputs
    assert operations(run) == ["add.Tensor", "copy_.default"]


def test_new_contents_that_are_a_result_too_have_memory_of_their_own() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        new = x + y
        x.copy_(new)
        return new

    run = run_of(program_on_cuda(fn, (3,), (3,)), "add")
    assert [node.name for node in run.outputs] == ["add"]
    assert not run.updated


def test_the_gradient_that_a_backward_begins_with_is_an_input() -> None:
    weight = torch.ones(3, device=pygraph.default_device())

    def fn(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            loss = (leaf * weight).sin().sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return gradient + torch.ones_like(x)

    program = program_on_cuda(fn, (3,))
    names = [node.name for node in program.nodes if node.op == "call_function" and "expand" not in node.name]
    run = run_of(program, *names)
    (begin,) = run.begins
    assert run.inputs[begin].target is torch.ops.aten.ones_like.default
    assert operations(run).count("ones_like.default") == 1, "ones that the function makes itself are none"
    assert [run.inputs[index] for index in run.static] == program.placeholders[1:]


def test_views_do_not_depend_on_the_layouts_of_decompositions() -> None:
    """The gradient of a softmax whose scores a loss takes transposed: its decomposition is not laid out as in eager."""

    def fn(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        loss = nll_loss((x @ w).log_softmax(-1).transpose(1, 2), labels)
        return torch.autograd.grad(loss, x)[0]

    args = (torch.rand(2, 3, 5), torch.rand(5, 7), torch.zeros(2, 3, dtype=torch.int64))
    program = pygraph.trace(fn)(*(arg.to(pygraph.default_device()) for arg in args))
    run = FusableRun(program, [node for node in program.nodes if is_work(node)], set())
    by_shape = {arg.shape: arg for arg in (*args, torch.ones(()))}
    inputs = [by_shape[torch.Size(spec.shape)] for spec in run.specs]
    *_, got = make_fx(run.module, decomposition_table=select_decomp_table())(*inputs)(*inputs)
    torch.testing.assert_close(got.view(2, 3, 5), fn(*args))  # the last view is made outside


def test_what_is_read_by_strides_is_laid_out_as_in_eager() -> None:
    """Inductor may lay it out in another way, as nothing else can see."""
    program = program_on_cuda(lambda x: (x.t() * 2).t().as_strided((2,), (1,)) + x.sin()[0, 0], (3, 2))
    fusable = {node.target.__name__: _is_fusable(node) for node in program.nodes if is_work(node)}  # type: ignore[union-attr]
    assert fusable == {"mul.Tensor": False, "sin.default": True, "add.Tensor": True}
