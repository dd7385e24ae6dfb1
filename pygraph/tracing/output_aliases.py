"""Outputs of a Program: which results share memory with inputs or with each other, read off the first run.

In that run, storages of fake tensors are shared exactly where eager shares memory.
"""

# The tracer works on torch's private parts (storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
from typing import Any

import torch

from pygraph.errors import TraceError, describe
from pygraph.ir.descriptors import Alias, Argument, Captured, Input, ScalarArgument, Static, TensorSpec
from pygraph.tracing.overlapping_inputs import InputViews
from pygraph.tracing.recording import Recording
from pygraph.tracing.static_results import check_static


@dataclasses.dataclass
class Outputs:
    """The leaves of a result, sorted by how a call gets them.

    A position is a number among the outputs of the recording's graph.

    Attributes:
        aliases: Views of inputs; views of shared memory (``index`` counts the entries of ``shared``); repeated results.
        statics: Values that are the same at every call.
        results: Values that the graph computes: the position and the leaf of each.
        shared: Memory that several results are views of: the position of one of them, and the number of elements.
    """

    aliases: list[Alias] = dataclasses.field(default_factory=list[Alias])
    statics: list[Static] = dataclasses.field(default_factory=list[Static])
    results: list[tuple[int, int]] = dataclasses.field(default_factory=list[tuple[int, int]])
    shared: list[tuple[int, int]] = dataclasses.field(default_factory=list[tuple[int, int]])


def classify_outputs(recording: Recording, inputs: list[Input], views: InputViews) -> Outputs:
    """Sort the leaves of a result into aliases, static values, results, and memory that results share.

    Args:
        recording: The first run of the function.
        inputs: The descriptors of the Program's inputs.
        views: How the recording's inputs are computed from them.

    Raises:
        TraceError: A result shares memory in a way that an `Alias` cannot express, or would have to be made anew.
    """
    outputs = Outputs()
    owners = _storage_owners(recording, inputs)
    arguments = {
        id(recording.values[index]): descriptor.leaf
        for index, descriptor in enumerate(recording.inputs)
        if isinstance(descriptor, (Argument, ScalarArgument))
    }
    returned: dict[int, int] = {}  # the leaf at which each tensor is returned first
    repeated: list[Alias] = []
    fresh: dict[int, list[tuple[int, int]]] = {}  # results by their storages
    position = 0
    for leaf, value in enumerate(recording.out_leaves):
        path = recording.out_paths[leaf]
        if id(value) in arguments:
            spec = TensorSpec.of(value) if isinstance(value, torch.Tensor) else None
            outputs.aliases.append(Alias(path, leaf, "argument", arguments[id(value)], spec))
        elif isinstance(value, torch.Tensor) and id(value) in returned:
            repeated.append(Alias(path, leaf, "result", returned[id(value)], _static_spec(value)))
        elif isinstance(value, torch.Tensor):
            returned[id(value)] = leaf
            owner = None if is_empty(value) else owners.get(value.untyped_storage()._cdata)
            if owner is not None:
                outputs.aliases.append(_input_alias(recording, inputs, views, owner, leaf))
            else:
                fresh.setdefault(value.untyped_storage()._cdata, []).append((position, leaf))
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            outputs.results.append((position, leaf))
        else:
            check_static(f"trace({recording.name})(…)", path, value, recording.environment)
            outputs.statics.append(Static(path, leaf, value))
            continue  # it is no output of the graph
        position += 1
    for group in fresh.values():
        _add_fresh(outputs, recording, group)
    outputs.aliases += repeated
    outputs.results.sort()
    return outputs


def _storage_owners(recording: Recording, inputs: list[Input]) -> dict[int, int]:
    """The input that each storage belongs to: an input of the recording, or ``-1 - n`` for captured tensor ``n``."""
    owners: dict[int, int] = {}
    for index, value in enumerate(recording.values):
        if isinstance(value, torch.Tensor):
            owners.setdefault(value.untyped_storage()._cdata, index)
    shared = _shares_captured(recording)
    for index, descriptor in enumerate(inputs):
        # Returned itself, or as a view of its fake. Eager makes a constant anew in every call.
        if isinstance(descriptor, Captured) and descriptor.kind != "constant":
            found = [descriptor.value]
            if shared:
                found.append(recording.mode.from_tensor(descriptor.value, static_shapes=True))
            for value in found:
                owners.setdefault(value.untyped_storage()._cdata, -1 - index)
    return owners


def _shares_captured(recording: Recording) -> bool:
    """Whether a result may be memory of a captured tensor's fake; to ask for each fake takes long."""
    # Storages of all that was made fake, as long as they live. Private; checked with torch 2.11 and 2.13.
    fakes = {s._cdata for s in recording.mode.fake_tensor_converter.meta_converter.storage_memo.values()}
    fakes -= {value.untyped_storage()._cdata for value in recording.values if isinstance(value, torch.Tensor)}
    results = (leaf for leaf in recording.out_leaves if isinstance(leaf, torch.Tensor))
    return any(leaf.untyped_storage()._cdata in fakes for leaf in results)


def _add_fresh(outputs: Outputs, recording: Recording, group: list[tuple[int, int]]) -> None:
    """Add tensors of one storage that the function has made: as results, or if several as views of shared memory."""
    # One without elements, as the rest of what was cut off, does not say where the memory begins.
    position, leaf = next((one for one in group if not is_empty(recording.out_leaves[one[1]])), group[0])
    first = recording.out_leaves[leaf]
    if len(group) == 1 or is_empty(first) or any(not isinstance(n, int) for n in first.shape):
        outputs.results.extend(group)
        return
    if any(recording.out_leaves[leaf].dtype != first.dtype for _, leaf in group):
        raise TraceError(describe(f"trace({recording.name})(…)", "results of different dtypes share memory"))
    for _, leaf in group:
        value, path = recording.out_leaves[leaf], recording.out_paths[leaf]
        spec = _view_spec(recording, value, path)
        outputs.aliases.append(
            Alias(path, leaf, "output", len(outputs.shared), spec, False, value.is_conj(), value.is_neg())
        )
    outputs.shared.append((position, first.untyped_storage().nbytes() // first.element_size()))


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to have no elements; asking a data-dependent shape would be an error."""
    sizes: tuple[Any, ...] = tuple(tensor.shape)
    return any(isinstance(size, int) and size == 0 for size in sizes)


def _static_spec(value: torch.Tensor) -> TensorSpec:
    """The spec of a tensor, or one without a shape if that depends on data."""
    layout: tuple[Any, ...] = (*value.shape, *value.stride())
    if all(isinstance(n, int) for n in layout):
        return TensorSpec.of(value)
    return TensorSpec((), (), value.dtype, value.device)


def _input_alias(recording: Recording, inputs: list[Input], views: InputViews, owner: int, leaf: int) -> Alias:
    """The alias for a result that is a view of an input.

    Args:
        recording: The first run of the function.
        inputs: The descriptors of the Program's inputs.
        views: How the recording's inputs are computed from them.
        owner: The input, as `_storage_owners` numbers them.
        leaf: The leaf of the result.
    """
    value, path = recording.out_leaves[leaf], recording.out_paths[leaf]
    spec = _view_spec(recording, value, path)
    identical = False
    if owner < 0:
        index = -1 - owner
        captured = inputs[index]
        assert isinstance(captured, Captured)
        source = captured.value
        start = source.storage_offset()
        identical = value is source
    else:
        source = recording.values[owner]
        index, layout = views.sources[owner]
        start = source.storage_offset() - (layout.offset if layout is not None else 0)
    if source.dtype != value.dtype:
        raise TraceError(describe(f"trace({recording.name})(…)", f"{path} is a view of another dtype"))
    spec = dataclasses.replace(spec, offset=spec.offset - start)
    conjugated, negated = value.is_conj() != source.is_conj(), value.is_neg() != source.is_neg()
    return Alias(path, leaf, "input", index, spec, identical, conjugated, negated)


def _view_spec(recording: Recording, value: torch.Tensor, path: str) -> TensorSpec:
    """The layout of a result that is a view, which must be the same at every call."""
    spec = TensorSpec.of(value)
    layout: tuple[Any, ...] = (*spec.shape, *spec.stride, spec.offset)
    if not all(isinstance(n, int) for n in layout):
        remedy = "Return a copy (clone()), or keep the shape: torch.where or a mask instead of fewer rows."
        problem = f"{path} is a view whose layout depends on data"
        raise TraceError(describe(f"trace({recording.name})(…)", problem, remedy=remedy))
    return spec
