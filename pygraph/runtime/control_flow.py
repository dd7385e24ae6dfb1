"""Branches and loops as nodes of a graph that is being recorded.

Their parts are graphs inside the graph. No pointer in a part changes between replays, as the region has copies around
them (`pygraph.transforms.conditional_copies`), whose pointers are found and proven as all others. So a part that the
recorded call does not take needs no proof of its own.
"""

# Torch's higher-order operations, and the graphs of their parts, are not typed.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pygraph.ir.control_flow import is_conditional, is_loop, operands_of
from pygraph.ir.descriptors import TensorSpec
from pygraph.ir.evaluate import clone_strided
from pygraph.ir.interpreter import Interpreter


class Recording(Protocol):
    """A device that records a graph, see `pygraph.runtime.driver.Driver`."""

    def branch(self, predicate: torch.Tensor, parts: Sequence[Callable[[], object]]) -> None:
        """Record a node that does the first part if the predicate is true, and else the second."""
        ...

    def loop(self, predicate: torch.Tensor, part: Callable[[], torch.Tensor]) -> None:
        """Record a node that repeats a part, which returns the next predicate, as long as it is true."""
        ...


def record(node: fx.Node, args: Sequence[Any], recording: Recording) -> tuple[torch.Tensor, ...]:
    """Record a branch or a loop, and return its results.

    Args:
        node: The node.
        args: The values of its arguments.
        recording: The device.
    """
    operands = operands_of(node, args)
    specs: Sequence[TensorSpec] = node.meta["spec"]
    results = [spec.empty() for spec in specs]
    if is_loop(node):
        _record_loop(args[0], args[1], results, operands, recording)
    else:
        parts = [_part(module, operands, results, recording) for module in args[1:3]]
        recording.branch(args[0], parts)
    return tuple(results)


def _part(
    module: fx.GraphModule, operands: Sequence[Any], results: Sequence[torch.Tensor], recording: Recording
) -> Callable[[], None]:
    def run() -> None:
        for result, value in zip(results, _run(module, operands, recording), strict=True):
            result.copy_(value)

    return run


def _record_loop(
    condition: fx.GraphModule,
    module: fx.GraphModule,
    carried: Sequence[torch.Tensor],
    operands: Sequence[Any],
    recording: Recording,
) -> None:
    for result, start in zip(carried, operands, strict=False):
        result.copy_(start)
    others = operands[len(carried) :]

    def turn() -> torch.Tensor:
        values = _run(module, [*carried, *others], recording)
        if len(values) > 1:  # one may be another's value of before
            values = [clone_strided(value) for value in values]
        for result, value in zip(carried, values, strict=True):
            result.copy_(value)
        return predicate()

    def predicate() -> torch.Tensor:
        return _run(condition, [*carried, *others], recording)[0]

    recording.loop(predicate(), turn)


def _run(module: fx.GraphModule, operands: Sequence[Any], recording: Recording) -> list[torch.Tensor]:
    return pytree.tree_leaves(_Part(module, recording).run(*operands))


class _Part(Interpreter):
    """Runs a part, with the branches and loops in it as nodes, too."""

    def __init__(self, module: fx.GraphModule, recording: Recording) -> None:
        super().__init__(module)
        self._recording = recording

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        if not is_conditional(n):
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        return record(n, args, self._recording)
