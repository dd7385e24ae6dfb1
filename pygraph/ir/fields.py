"""The fields of a Program, as the modules below it see them."""

# ruff: noqa: D102  # the fields are described where they are defined, in `pygraph.ir.program`

from __future__ import annotations

from typing import Any, Protocol

from torch import fx
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

from pygraph.errors import ArgumentError, describe
from pygraph.ir.descriptors import (
    Alias,
    Baked,
    Fallback,
    Input,
    Output,
    PointerTable,
    Region,
    Stage,
    Static,
)


class ProgramFields(Protocol):
    """The fields of a `pygraph.Program`, for what a Program itself is made with: its text and its evaluation."""

    @property
    def name(self) -> str: ...
    @property
    def stage(self) -> Stage: ...
    @property
    def history(self) -> tuple[str, ...]: ...
    @property
    def module(self) -> fx.GraphModule: ...
    @property
    def inputs(self) -> tuple[Input, ...]: ...
    @property
    def outputs(self) -> tuple[Output, ...]: ...
    @property
    def aliases(self) -> tuple[Alias, ...]: ...
    @property
    def statics(self) -> tuple[Static, ...]: ...
    @property
    def baked(self) -> tuple[Baked, ...]: ...
    @property
    def gradients(self) -> frozenset[int] | None: ...
    @property
    def regions(self) -> tuple[Region, ...]: ...
    @property
    def fallbacks(self) -> tuple[Fallback, ...]: ...
    @property
    def placeholders(self) -> list[fx.Node]: ...
    @property
    def results(self) -> tuple[Any, ...]: ...
    @property
    def table(self) -> PointerTable | None: ...
    @property
    def in_tree(self) -> pytree.TreeSpec: ...
    @property
    def out_tree(self) -> pytree.TreeSpec: ...


def check_is_program(call: str, value: object) -> None:
    """Raise ArgumentError unless a value is a Program.

    Args:
        call: What it was passed to, with ``{}`` in its place.
        value: The value.
    """
    if isinstance(getattr(value, "module", None), fx.GraphModule) and hasattr(value, "in_tree"):
        return
    remedy = "Take trace(f)(…), or the program of f.lower(…)."
    name = getattr(value, "__name__", type(value).__name__)
    raise ArgumentError(describe(call.format(name), "not a Program", expected="a Program", remedy=remedy))
