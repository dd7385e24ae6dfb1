"""Evaluation of backward Programs as plain operations, as ``torch.vmap`` and autocast need it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.errors import TraceError, describe
from pygraph.ir.descriptors import Captured, Result, TensorSpec
from pygraph.ir.evaluate import input_value
from pygraph.ir.interpreter import Interpreter
from pygraph.ir.program import Program
from pygraph.tracing.explicit_generators import inputs_known


def evaluate_batched(program: Program, leaves: Sequence[Any]) -> Any:
    """Evaluate a backward on tensors that `torch.vmap` may have wrapped, whose strides are not those of the trace.

    Raises:
        TraceError: The Program depends on strides.
    """
    if program.aliases or any(str(node.target).startswith("aten.as_strided") for node in program.nodes):
        raise TraceError(describe(f"vmap({program.name})", "it depends on the strides of its tensors"))
    module = program.copy_graph()
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    module.recompile()
    with inputs_known(program):
        return _unflattened(program, module(*_values(program, leaves)))


def evaluate_cast(program: Program, leaves: Sequence[Any]) -> Any:
    """Evaluate a backward that is called under autocast, which holds for its operations.

    As in autograd, gradients are in the dtypes of what they are gradients of, whatever an operation returns.
    """
    with inputs_known(program):
        return _unflattened(program, _DtypeKeeping(program.module).run(*_values(program, leaves)))


class _DtypeKeeping(Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result, spec = super().run_node(n), n.meta.get("spec")
        return result.to(spec.dtype) if isinstance(spec, TensorSpec) and isinstance(result, torch.Tensor) else result


def _values(program: Program, leaves: Sequence[Any]) -> list[Any]:
    return [d.value.detach() if isinstance(d, Captured) else input_value(d, leaves) for d in program.inputs]


def _unflattened(program: Program, values: Iterable[Any]) -> Any:
    out: list[Any] = [None] * program.out_tree.num_leaves
    for descriptor, value in zip(program.outputs, values, strict=True):
        assert isinstance(descriptor, Result)
        out[descriptor.leaf] = value
    return pytree.tree_unflatten(out, program.out_tree)
