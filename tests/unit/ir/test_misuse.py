"""What takes a Program says so when it is given something else, and a Program what is wrong with its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pygraph
from pygraph.errors import ArgumentError, ProgramError


def step(x: torch.Tensor, k: float) -> torch.Tensor:
    return x * k


@pytest.fixture
def x(device: torch.device) -> torch.Tensor:
    return torch.ones(2, device=device)


@pytest.fixture
def program(x: torch.Tensor) -> pygraph.Program:
    return pygraph.trace(step)(x, 2.0)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda other: pygraph.evaluate(other, torch.ones(2)), r"evaluate\(step, …\)"),
        (pygraph.check_program, r"check_program\(step\)"),
        (lambda other: pygraph.check_transform(pygraph.devicify, other, torch.ones(2)), r"check_transform\(…, step\)"),
        (lambda other: pygraph.diff(other, other), r"diff\(…, before=step\)"),
    ],
    ids=["evaluate", "check_program", "check_transform", "diff"],
)
def test_a_function_for_a_program(call: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told + r": not a Program; expected a Program\. Take trace\(f\)\(…\)"):
        call(step)
    with pytest.raises(ArgumentError, match="not a Program"):
        call(torch.nn.Linear(2, 2))


def test_no_transform(program: pygraph.Program, x: torch.Tensor) -> None:
    for transform, told in ((program, "Program is no transform"), ("fuse", "str is no transform")):
        with pytest.raises(ArgumentError, match=told):
            pygraph.check_transform(transform, program, x, 2.0)
    with pytest.raises(ProgramError, match="it returns a str; expected a Program"):
        pygraph.check_transform(str, program, x, 2.0)


@pytest.mark.parametrize("value", ["a", "3", None, b"1", 1j])
def test_what_is_no_number(program: pygraph.Program, x: torch.Tensor, value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"step\(…\): args\[1\] is .*; expected a number|another structure"):
        program(x, value)
    with pytest.raises(ArgumentError, match=r"expected a number|another structure"):
        pygraph.jit(step).lower(x, 2.0).compile()(x, value)


@pytest.mark.parametrize("value", [3, 3.0, True, np.float32(3), np.int64(3)])
def test_numbers(program: pygraph.Program, x: torch.Tensor, value: Any) -> None:
    assert program(x, value).tolist() == [float(value)] * 2


@pytest.mark.parametrize(
    ("most", "told"),
    [
        ("x.svg", r"most='x.svg'; expected a positive integer\. For a file, write draw\(\)\.save"),
        (Path("x.svg"), r"write draw\(\)\.save"),
        (0, r"most=0; expected a positive integer\.$"),
        (True, "most=True"),
        (2.5, "most=2.5"),
    ],
)
def test_the_number_of_nodes_drawn(program: pygraph.Program, most: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        program.draw(most)


def test_a_report_is_a_page(x: torch.Tensor, tmp_path: Path) -> None:
    report = pygraph.jit(step).explain()
    for name in ("report.png", "report", "report.html.gz"):
        with pytest.raises(ArgumentError, match=r"explain\(\)\.save\('.*'\): unknown kind of file; .*\.html, \.htm"):
            report.save(tmp_path / name)
        assert not (tmp_path / name).exists()
    for name in ("report.htm", "report.HTML"):
        report.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("value", [None, "1", -1.0, float("nan"), float("inf")])
def test_what_a_timer_returns(x: torch.Tensor, value: Any) -> None:
    fast = pygraph.select(pygraph.graphify(pygraph.indirect(torch.sin)), timer=lambda run: value)
    with pytest.raises(ArgumentError, match=r"select\(…\): the timer returns .*; expected the microseconds of a run"):
        fast(x)
