"""What type checkers make of transforms: read by pyright, as the Makefile calls it, and never run."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=error
from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor

import pygraph
from pygraph import Program, Transformed
from pygraph.api.module import TransformedModule


def scaled(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def functions(x: Tensor) -> None:
    fast = pygraph.jit(scaled)
    assert_type(fast(x, 2.0), Tensor)
    assert_type(fast.lower(x, 2.0), pygraph.Lowered)
    assert_type(fast.explain(), pygraph.Explanation)
    assert_type(pygraph.jit(strict=True)(scaled)(x), Tensor)
    stack = pygraph.select(pygraph.graphify(pygraph.indirect(pygraph.devicify(scaled), mechanism="host")), budget=0.1)
    assert_type(stack(x, scale=2.0), Tensor)
    assert_type(pygraph.graphify(max_graphs=2)(scaled)(x), Tensor)
    _: Transformed[..., Tensor] = pygraph.fuse(scaled)


def modules(model: torch.nn.Linear) -> None:
    assert_type(pygraph.jit(model), TransformedModule)
    assert_type(pygraph.graphify(pygraph.indirect(model)), TransformedModule)
    assert_type(pygraph.select()(model), TransformedModule)


class Trainer:
    @pygraph.jit
    def step(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    @pygraph.jit(strict=True)
    def strictly(self, x: Tensor) -> tuple[Tensor, int]:
        return x, 1


def methods(trainer: Trainer, x: Tensor) -> None:
    assert_type(trainer.step(x, scale=2.0), Tensor)
    assert_type(trainer.strictly(x), tuple[Tensor, int])
    assert_type(trainer.step.lower(x), pygraph.Lowered)
    assert_type(trainer.step.explain(), pygraph.Explanation)
    assert_type(Trainer.step(trainer, x), Tensor)
    trainer.step("x")  # pyright: ignore[reportArgumentType]


def programs(program: Program) -> None:
    assert_type(pygraph.graphify(pygraph.indirect(pygraph.devicify(program))), Program)
    assert_type(pygraph.indirect(mechanism="copy")(program), Program)


def wrong(x: Tensor) -> None:
    fast = pygraph.devicify(scaled)
    fast(x, "two")  # pyright: ignore[reportArgumentType]
    fast()  # pyright: ignore[reportCallIssue]
    pygraph.indirect(scaled, mechanism="magic")  # pyright: ignore[reportArgumentType, reportCallIssue]
