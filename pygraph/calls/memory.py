"""Checks of the memory that a Program writes, before it runs for a call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from pygraph.errors import TraceError, describe
from pygraph.ir.descriptors import Argument, Base, Captured
from pygraph.ir.effects import writes_memory
from pygraph.ir.program import Program
from pygraph.ir.ranges import Ranges, share_memory, sharing, span_of
from pygraph.lowering.aten import written_inputs

_aten = torch.ops.aten

_VIEWS_OF_STORAGES = (
    _aten.as_strided.default, _aten.as_strided_.default, _aten.as_strided_copy.default,
    _aten.as_strided_scatter.default,
)  # fmt: skip
"""Operations that reach elements of a tensor's storage that are not the tensor's."""


def check_disjoint(program: Program, leaves: Sequence[Any], name: str) -> None:
    """Refuse a Program that writes where a captured tensor shares memory with an argument or another one.

    Captured tensors may lie behind each other in one storage, as the weights of a recurrent layer do.
    """
    captured = [(d.name, d.value) for d in program.inputs if isinstance(d, Captured) and d.value.numel()]
    if not captured or not (written_inputs(program) or writes_memory(program.nodes)):
        return
    views_beyond = any(node.target in _VIEWS_OF_STORAGES for node in program.nodes)
    for group in sharing((index, value) for index, (_, value) in enumerate(captured)):
        ordered = sorted(group, key=lambda index: captured[index][1].data_ptr())
        for first, second in itertools.pairwise(ordered):
            _, end = span_of([captured[first][1]])
            if views_beyond or captured[second][1].data_ptr() < end:
                both = f"{captured[second][0]} and {captured[first][0]}"
                raise TraceError(describe(f"{name}(…)", f"{both} share memory, and one is written"))
    owned = Ranges(value for _, value in captured)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and owned.meet(leaf):
            owner = next(owner for owner, value in captured if share_memory(value, leaf))
            raise TraceError(describe(f"{name}(…)", f"an argument shares memory with {owner}, and one is written"))


def check_updatable(program: Program, leaves: Sequence[Any], name: str) -> None:
    """Refuse a Program that writes to inference tensors outside inference mode, where eager raises."""
    if torch.is_inference_mode_enabled():
        return
    for index in written_inputs(program):
        descriptor = program.inputs[index]
        written = [leaves[descriptor.leaf]] if isinstance(descriptor, Argument) else []
        written += [leaves[leaf] for leaf in descriptor.leaves] if isinstance(descriptor, Base) else []
        written += [descriptor.value] if isinstance(descriptor, Captured) else []
        if any(tensor.is_inference() for tensor in written):
            raise TraceError(describe(f"{name}(…)", "it updates an inference tensor outside inference mode"))
