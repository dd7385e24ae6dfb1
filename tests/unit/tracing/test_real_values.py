"""A value that Python asks for is computed of the call's arguments, which stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from pygraph.tracing.real_values import value_at

aten = torch.ops.aten


@pytest.mark.parametrize(
    "operation",
    [
        aten.native_batch_norm.default,  # whose update of statistics its schema does not declare
        aten._native_batch_norm_legit.default,
    ],
)
def test_statistics_stay(operation: Any) -> None:
    graph = fx.Graph()
    x, weight, bias, mean, var = (graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var"))
    norm = graph.call_function(operation, (x, weight, bias, mean, var, True, 0.5, 1e-5))
    out = graph.call_function(aten.add.Tensor, (mean, 0))
    graph.output((norm, out))
    values = [torch.randn(8, 3) + 4, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3)]
    expected = values[0].mean(0) / 2
    found = value_at(out, out, torch.nn.Module(), values, lambda: None)
    torch.testing.assert_close(found, expected)
    assert values[3].tolist() == [0, 0, 0]
    assert values[4].tolist() == [1, 1, 1]
