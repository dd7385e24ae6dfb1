"""Runs of operations compiled with Inductor, as far as no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.program import output_values
from pygraph.lowering.fused_run import compile_run, restore_strides


def test_results_have_the_strides_of_eager_whatever_a_saved_tensor_has() -> None:
    """A saved tensor is in channels-last format here; a view of it becomes a copy."""

    def backward(saved: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return saved * 2, other + 1, saved.view(2, -1).sum(1), saved.permute(1, 0, 2, 3) * 3

    with FakeTensorMode():
        saved, other = torch.empty(2, 3, 4, 5), torch.empty(4, 3)
        module = make_fx(backward)(saved, other)
        expected = [value.stride() for value in backward(saved, other)]
        given = saved.contiguous(memory_format=torch.channels_last)
        restore_strides(module, [given, other])
        assert [value.stride() for value in module(given, other)] == expected
        values = output_values(module.graph)
    copied = [value.target is torch.ops.aten.copy.default for value in values]
    assert copied == [True, False, False, True]
    assert [value.meta["val"].stride() for value in values] == expected


def test_nothing_is_copied_where_strides_are_eagers() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 3).t()
        module = make_fx(lambda x: (x * 2, x.sum(0)))(x)
        restore_strides(module, [x])
    assert all(node.target is not torch.ops.aten.copy.default for node in module.graph.nodes)


@pytest.mark.parametrize("operation", [torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default])
def test_shapes_and_numbers_that_depend_on_data_are_refused(operation: Any) -> None:
    x = torch.ones(())
    graph = fx.Graph()
    arg = graph.placeholder("arg0")
    graph.output((graph.call_function(operation, (graph.call_function(torch.ops.aten.neg.default, (arg,)),)),))
    with pytest.raises((DynamicOutputShapeException, DataDependentOutputException)):
        compile_run(fx.GraphModule(torch.nn.Module(), graph), [TensorSpec.of(x)], "f", (), ())
