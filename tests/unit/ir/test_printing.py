"""The text of a Program: runnable, stable, with provenance."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import pygraph
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.printing import NAMESPACE, program_text, spec_text, target_text


def run_text(program: pygraph.Program, *values: Any) -> Any:
    scope = dict(NAMESPACE)
    exec(program_text(program), scope)
    return scope["program"](*values)


X = torch.arange(6.0).view(2, 3)

FUNCTIONS: list[tuple[Any, tuple[Any, ...]]] = [
    (lambda x: torch.relu(x) @ x.t(), (X,)),
    (lambda x: x.sum(dim=(0, 1), keepdim=True), (X,)),
    (lambda x: torch.full_like(x, float("inf")) * float("-inf"), (X,)),
    (lambda x: x.to(torch.float64), (X,)),
    (lambda x: torch.split(x, [1, 2], dim=1), (X,)),
    (lambda x: torch.topk(x, 2).values, (X,)),
    (lambda x, k: x * k + k, (X, 2.5)),
    (lambda x, k: x + (k * 2 + 1), (X, 3)),
    (lambda x: x[:, torch.tensor([0, 2])], (X,)),
    (lambda: torch.ones(2), ()),
    (lambda x: None, (X,)),
]


@pytest.mark.parametrize(("fn", "args"), FUNCTIONS)
def test_the_text_runs_and_gives_what_the_module_gives(fn: Any, args: tuple[Any, ...]) -> None:
    program = pygraph.trace(fn)(*args)
    values = [*args, *(d.value for d in program.inputs if hasattr(d, "value"))]
    got, expected = run_text(program, *values), program.module(*values)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_text_of_every_stage_runs(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    program = pygraph.devicify(pygraph.trace(lambda x, k: x * k)(x, 2.0))
    (result,) = run_text(program, x, 3.0)
    assert result.tolist() == [3.0, 3.0]
    out = torch.empty_like(x)
    table = torch.tensor([x.data_ptr(), out.data_ptr()])
    for stage in (pygraph.indirect, pygraph.graphify):
        program = stage(program)
        out.zero_()
        assert run_text(program, table, 4.0) == (None,)
        assert out.tolist() == [4.0, 4.0]


def test_the_text_is_stable_and_free_of_addresses() -> None:
    texts = {str(pygraph.trace(FUNCTIONS[0][0])(torch.ones(2, 3))) for _ in range(2)}
    assert len(texts) == 1
    assert not re.search(r"0x[0-9a-f]{6,}", texts.pop())


def test_names_come_from_descriptors_and_operations() -> None:
    weight = torch.ones(3)
    program = pygraph.trace(lambda args: args["w"] + weight + args["w"])({"w": torch.zeros(3)})
    text = str(program)
    assert "args_0_w:" in text
    assert "# closed-over weight" in text
    assert re.search(r"add: .*\n +add_1: ", text)


def test_the_header_says_which_passes_made_it() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    program = pygraph.devicify(pygraph.trace(step)(torch.ones(2)))
    assert str(program).startswith("# step (aten): trace | devicify\n")


def test_lines_carry_the_users_source_line() -> None:
    program = pygraph.trace(lambda x: torch.sin(x))(torch.ones(2))
    assert re.search(r"sin: .*  # test_printing\.py:\d+\n", str(program))


def test_aliases_mutations_and_statics_are_comments() -> None:
    program = pygraph.trace(lambda x: (x.add_(1), x[0], "text"))(torch.ones(2, 2))
    text = str(program)
    assert "# new contents of args[0]" in text
    assert "# result[0]: is " in text
    assert "# result[1]: float32[2] cpu view of args[0] at 0" in text
    assert "# result[2]: 'text'" in text


def test_regions_and_fallbacks_are_printed(device: torch.device) -> None:
    program = pygraph.graphify(pygraph.trace(lambda x: x * x.sum().item())(torch.ones(2, device=device)))
    text = str(program)
    assert re.search(r"# fallback: aten\._local_scalar_dense\.default: it needs a value on the host, test_pr", text)
    assert "# region 1: eager, launch, because it needs a value on the host (test_printing.py:" in text
    assert "    # region 1\n" in text


def test_functions_of_higher_order_operations_are_printed_first() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    program = pygraph.trace(fn)(torch.ones(2))
    assert re.match(r"# fn .*\ndef \w+\(x\b.*\):\n", str(program))


@pytest.mark.parametrize(
    ("spec", "text"),
    [(None, "?"), (int, "int"), (float, "float"),
     ((TensorSpec.of(torch.empty(2)), int), "(float32[2] cpu, int)")],
)  # fmt: skip
def test_spec_text(spec: Any, text: str) -> None:
    assert spec_text(spec) == text


def test_target_text() -> None:
    import math
    import operator

    assert target_text(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert target_text(torch.ops.pygraph.load.default) == "pygraph_ops.load.default"
    assert target_text(operator.getitem) == "operator.getitem"
    assert target_text(math.floor) == "math.floor"
    assert target_text(torch.sym_max) == "torch.sym_max"
