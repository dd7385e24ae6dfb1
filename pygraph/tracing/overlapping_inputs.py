"""Inputs that share memory: where one of them is written, all become views of one flat input, the base."""

# The tracer works on torch's private parts (storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pygraph.errors import TraceError, describe
from pygraph.ir.descriptors import Argument, Base, Input, TensorSpec
from pygraph.ir.effects import is_written
from pygraph.tracing.hidden_writes import HIDDEN_WRITES
from pygraph.tracing.recording import Recording

aten = torch.ops.aten


class InputViews:
    """Computes the inputs of a recording from those of the Program, of which some are bases.

    Attributes:
        sources: For each input of the recording, the number of the Program's input that it is a view of, and the
            layout of the view; None for the input itself.
    """

    def __init__(self, count: int) -> None:
        self.sources: list[tuple[int, TensorSpec | None]] = [(index, None) for index in range(count)]

    def apply(self, placeholders: Sequence[Any]) -> list[Any]:
        """The recording's inputs, given the Program's."""
        values: list[Any] = []
        for index, spec in self.sources:
            value = placeholders[index]
            values.append(value if spec is None else value.as_strided(spec.shape, spec.stride, spec.offset))
        return values


def merge_overlapping(
    recording: Recording, inputs: list[Input], values: list[Any]
) -> tuple[list[Input], list[Any], InputViews]:
    """Replace inputs that share memory, one of which is written, by one base of which they are views.

    Args:
        recording: The first run of the function.
        inputs: The descriptors of its inputs, captured tensors included.
        values: Their fake tensors and symbols.

    Returns:
        The descriptors and values of the Program's inputs, and how the recording's are computed from them.
    """
    views = InputViews(len(inputs))
    groups: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and isinstance(inputs[index], Argument) and value.numel():
            groups.setdefault(value.untyped_storage()._cdata, []).append(index)
    shared = {group[0]: group for group in groups.values() if len(group) > 1}
    if not shared or not _has_writes(recording.module):
        return inputs, values, views
    members = {member for group in shared.values() for member in group}
    new_inputs: list[Input] = []
    new_values: list[Any] = []
    for index, descriptor in enumerate(inputs):
        if index in shared:
            base, layouts = _base_of(recording, inputs, values, shared[index])
            for member, layout in layouts.items():
                views.sources[member] = (len(new_inputs), layout)
            new_inputs.append(base)
            with recording.mode, torch.no_grad():
                new_values.append(base.spec.empty())
        elif index not in members:
            views.sources[index] = (len(new_inputs), None)
            new_inputs.append(descriptor)
            new_values.append(values[index])
    return new_inputs, new_values, views


def _base_of(
    recording: Recording, inputs: list[Input], values: list[Any], group: list[int]
) -> tuple[Base, dict[int, TensorSpec]]:
    """The base of inputs that share memory, and the layout of each in it."""
    if len({values[member].dtype for member in group}) > 1:
        raise TraceError(
            describe(f"trace({recording.name})(…)", "overlapping arguments of different dtypes, one written")
        )
    first = min(group, key=lambda member: values[member].storage_offset())
    start = values[first].storage_offset()
    specs = {member: TensorSpec.of(values[member]) for member in group}
    size = max(spec.offset - start + spec.span for spec in specs.values())
    spec = TensorSpec((size,), (1,), values[first].dtype, values[first].device)
    leaves = tuple(inputs[member].leaf for member in group)  # pyright: ignore
    path = " + ".join(inputs[member].path for member in group)  # pyright: ignore
    layouts = {member: dataclasses.replace(spec, offset=spec.offset - start) for member, spec in specs.items()}
    return Base(path, leaves, inputs[first].leaf, spec), layouts  # pyright: ignore


def _has_writes(module: fx.GraphModule) -> bool:
    return any(is_written(node) or node.target in HIDDEN_WRITES for node in module.graph.nodes)


def relative_views(graph: fx.Graph, placeholders: list[fx.Node], inputs: list[Input]) -> None:
    """Express views of bases relative to the base: at a call, the base may be anywhere in its storage."""
    bases = {node for node, descriptor in zip(placeholders, inputs, strict=True) if isinstance(descriptor, Base)}
    for node in list(graph.nodes):
        scatter = node.target is aten.as_strided_scatter.default
        if not (scatter or node.target is aten.as_strided.default) or node.args[0] not in bases:
            continue
        if len(node.args) < (5 if scatter else 4):
            continue  # without an offset it is relative already
        base, *middle, size, stride, offset = node.args
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        part_value = base.meta["val"].new_empty(span)
        with graph.inserting_before(node):
            part = graph.call_function(aten.slice.Tensor, (base, 0, offset, offset + span))
        part.meta = {**node.meta, "val": part_value}
        node.args = (part, *middle, size, stride)
        if scatter:
            with graph.inserting_after(node):
                whole = graph.call_function(aten.slice_scatter.default, (base, node, 0, offset, offset + span))
            node.replace_all_uses_with(whole, delete_user_cb=functools.partial(operator.is_not, whole))
            whole.meta = {**node.meta}
            node.meta["val"] = part_value
            bases.add(whole)
