"""Constants on the host: which are folded, and which the device can compute with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.ir.program import Program
from pygraph.transforms.host_values.constants import constant_name, host_constants, is_exact

TABLE = torch.tensor([1.0, 2.0])  # closed over by a function below; its owner may change it


def traced(fn: Callable[..., Any], device: torch.device) -> Program:
    return pygraph.trace(fn)(torch.ones(2, device=device))


def folded(program: Program) -> list[list[float]]:
    """The values of constants that are computed from others."""
    constants = host_constants(program.module.graph, program)
    return [value.tolist() for node, value in constants.items() if node.op == "call_function"]


def test_operations_on_constants_are_folded(device: torch.device) -> None:
    program = traced(lambda x: x + torch.tensor([1.0, 2.0]).mul(3).to(x.device), device)
    assert [3.0, 6.0] in folded(program)


def test_constants_that_stay_on_the_host_are_not_computed(device: torch.device) -> None:
    program = traced(lambda x: (x + 1, torch.arange(2) + 1), device)
    assert folded(program) == []


@pytest.mark.parametrize("fn", [lambda x: x + (TABLE * 3).to(x.device), lambda x: x + torch.rand(2).to(x.device)])
def test_what_can_differ_between_calls_is_no_constant(fn: Callable[..., Any], device: torch.device) -> None:
    assert folded(traced(fn, device)) == []


@pytest.mark.parametrize(
    ("fn", "exact"),
    [
        (lambda: torch.arange(2), True),
        (lambda: torch.arange(2.0), False),
        (lambda: torch.ones(2, 2).tril(), True),
        (lambda: torch.ones(2).exp(), False),
        (lambda: torch.zeros(2).add(torch.ones(2), alpha=0.1), False),
    ],
)
def test_exact_operations_have_the_same_bits_on_every_device(
    fn: Callable[[], torch.Tensor], exact: bool, device: torch.device
) -> None:
    program = traced(lambda x: x + fn().to(x.device), device)
    (upload,) = [node for node in program.nodes if str(node.target) == "aten._to_copy.default"]
    assert is_exact(upload.args[0]) is exact


def test_a_constant_has_the_name_of_its_origin(device: torch.device) -> None:
    program = traced(lambda x: x + torch.tensor([1.0, 2.0]).mul(3).to(x.device) + torch.ones(2).to(x.device), device)
    names = {
        constant_name(node.args[0], list(program.inputs))
        for node in program.nodes
        if str(node.target) == "aten._to_copy.default"
    }
    assert len(names) == 2
    assert any(name.startswith("aten.ones.default at ") and "test_constants.py" in name for name in names)
