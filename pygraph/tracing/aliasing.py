"""Which inputs and outputs share memory, read off the first run, where storages are shared as in eager."""

# The tracer works on torch's private parts (frames, storages' identities) and on values of any type.
# pyright: reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor  # checked with torch 2.11 and 2.13

from pygraph.errors import TraceError, describe
from pygraph.guards.environment import Environment
from pygraph.guards.packages import is_library
from pygraph.ir.constants import IMMUTABLE
from pygraph.ir.descriptors import Alias, Argument, Base, Captured, Input, ScalarArgument, Static, TensorSpec
from pygraph.ir.effects import is_written
from pygraph.ir.evaluate import physical
from pygraph.tracing.hidden_writes import HIDDEN_WRITES
from pygraph.tracing.recording import Recording

aten = torch.ops.aten

# Of these there is one object for each value, or nobody can tell that there is not.
_SINGLETONS = (
    *IMMUTABLE, type, types.ModuleType, enum.Enum, types.EllipsisType, types.NotImplementedType,
    torch.layout, torch.memory_format, torch.qscheme,
)  # fmt: skip


class _Rebuild:
    """How the recording's inputs come out of the Program's, where some became views of a shared base."""

    def __init__(self, count: int) -> None:
        self.sources: list[tuple[int, TensorSpec | None, torch.dtype | None]] = [(i, None, None) for i in range(count)]

    def unpack(self, placeholders: Sequence[Any]) -> list[Any]:
        values: list[Any] = []
        for index, spec, dtype in self.sources:
            value = placeholders[index]
            if spec is not None:
                value = value if dtype is None else value.view(dtype)
                value = value.as_strided(spec.shape, spec.stride, spec.offset)
            values.append(value)
        return values


def merge_overlapping(
    recording: Recording, inputs: list[Input], values: list[Any]
) -> tuple[list[Input], list[Any], _Rebuild]:
    """Replace inputs that share memory, one of which is written, by one flat base of which they are views."""
    rebuild = _Rebuild(len(inputs))
    groups: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and isinstance(inputs[index], Argument) and value.numel():
            groups.setdefault(value.untyped_storage()._cdata, []).append(index)
    shared = [group for group in groups.values() if len(group) > 1]
    if not shared or not _has_writes(recording.module):
        return inputs, values, rebuild
    merged: dict[int, int] = {}
    new_inputs: list[Input] = []
    new_values: list[Any] = []
    for index, descriptor in enumerate(inputs):
        group = next((group for group in shared if index in group), None)
        if group is None:
            merged[index] = len(new_inputs)
            new_inputs.append(descriptor)
            new_values.append(values[index])
        elif index == group[0]:
            dtypes = {values[member].dtype for member in group}
            if len(dtypes) > 1:
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
            for member in group:
                merged[member] = len(new_inputs)
                view = dataclasses.replace(specs[member], offset=specs[member].offset - start)
                rebuild.sources[member] = (len(new_inputs), view, None)
            new_inputs.append(Base(path, leaves, inputs[first].leaf, spec))  # pyright: ignore
            with recording.mode, torch.no_grad():
                new_values.append(spec.empty())
    rebuild.sources = [(merged[i], spec, dtype) for i, (_, spec, dtype) in enumerate(rebuild.sources)]
    return new_inputs, new_values, rebuild


def _is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to have no elements; asking a data-dependent shape would be an error."""
    sizes: tuple[Any, ...] = tuple(tensor.shape)
    return any(isinstance(size, int) and size == 0 for size in sizes)


def _has_writes(module: fx.GraphModule) -> bool:
    return any(is_written(node) or node.target in HIDDEN_WRITES for node in module.graph.nodes)


def classify_outputs(
    recording: Recording, inputs: list[Input], rebuild: _Rebuild
) -> tuple[list[Alias], list[Static], list[tuple[int, int]], list[tuple[int, int]]]:
    """Sort the returned leaves into aliases, static values and results.

    Returns aliases (those of outputs count from the first hidden result), statics, results as (position among the
    recording's outputs, leaf), and hidden results as (position, number of elements of the shared storage).
    """
    originals = [*recording.values]
    by_storage: dict[int, int] = {}
    for index, value in enumerate(originals):
        if isinstance(value, torch.Tensor):
            by_storage.setdefault(value.untyped_storage()._cdata, index)
    shared = _shares_captured(recording)
    for index, descriptor in enumerate(inputs):
        # Returned itself, or as a view of the fake that stood for it. Eager makes a constant anew in every call.
        if isinstance(descriptor, Captured) and descriptor.kind != "constant":
            found = [descriptor.value]
            if shared:
                found.append(recording.mode.from_tensor(descriptor.value, static_shapes=True))
            for value in found:
                by_storage.setdefault(value.untyped_storage()._cdata, -1 - index)

    aliases: list[Alias] = []
    statics: list[Static] = []
    fresh: dict[int, list[tuple[int, int]]] = {}
    results: list[tuple[int, int]] = []
    hidden: list[tuple[int, int]] = []
    position = 0
    arguments = {
        id(recording.values[index]): descriptor.leaf
        for index, descriptor in enumerate(recording.inputs)
        if isinstance(descriptor, (Argument, ScalarArgument))
    }
    returned: dict[int, int] = {}
    repeats: list[Alias] = []
    for leaf, value in enumerate(recording.out_leaves):
        path = recording.out_paths[leaf]
        if id(value) in arguments:
            spec = TensorSpec.of(value) if isinstance(value, torch.Tensor) else None
            aliases.append(Alias(path, leaf, "argument", arguments[id(value)], spec))
            position += 1
        elif isinstance(value, torch.Tensor) and id(value) in returned:
            repeats.append(Alias(path, leaf, "result", returned[id(value)], _fixed_spec(value)))
            position += 1
        elif isinstance(value, torch.Tensor):
            returned[id(value)] = leaf
            owner = None if _is_empty(value) else by_storage.get(value.untyped_storage()._cdata)
            if owner is not None:
                aliases.append(_input_alias(recording, inputs, rebuild, owner, value, path, leaf))
            else:
                fresh.setdefault(value.untyped_storage()._cdata, []).append((position, leaf))
            position += 1
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            results.append((position, leaf))
            position += 1
        elif isinstance(value, type) and issubclass(value, _STAND_INS):
            raise TraceError(
                describe(f"trace({recording.name})(…)", f"{path} is the class of a tensor or number, which has"
                         " another one in a trace", remedy="Return no classes.")
            )  # fmt: skip
        elif _is_constant(value, recording.environment):
            statics.append(Static(path, leaf, value))
        else:
            raise TraceError(
                describe(f"trace({recording.name})(…)", f"{path} is a {type(value).__name__} that it makes anew",
                         expected="tensors, numbers, and objects that were there before",
                         remedy="Return tensors in tuples, lists or dicts.")
            )  # fmt: skip
    for group in fresh.values():
        first = recording.out_leaves[group[0][1]]
        if len(group) == 1 or _is_empty(first) or any(not isinstance(n, int) for n in first.shape):
            results.extend(group)
            continue
        itemsize = first.element_size()
        if any(recording.out_leaves[leaf].dtype != first.dtype for _, leaf in group):
            raise TraceError(describe(f"trace({recording.name})(…)", "results of different dtypes share memory"))
        for _, leaf in group:
            spec = _place(recording, recording.out_leaves[leaf], recording.out_paths[leaf])
            lazy = recording.out_leaves[leaf].is_conj(), recording.out_leaves[leaf].is_neg()
            aliases.append(Alias(recording.out_paths[leaf], leaf, "output", len(hidden), spec, False, *lazy))
        hidden.append((group[0][0], first.untyped_storage().nbytes() // itemsize))
    return aliases + repeats, statics, sorted(results), hidden


def _shares_captured(recording: Recording) -> bool:
    """Whether a result may be memory of a fake that stood for a captured tensor; to ask for each takes long."""
    # Storages of all that was made fake, as long as they live. Private; checked with torch 2.11 and 2.13.
    fakes = {s._cdata for s in recording.mode.fake_tensor_converter.meta_converter.storage_memo.values()}
    fakes -= {value.untyped_storage()._cdata for value in recording.values if isinstance(value, torch.Tensor)}
    results = (leaf for leaf in recording.out_leaves if isinstance(leaf, torch.Tensor))
    return any(leaf.untyped_storage()._cdata in fakes for leaf in results)


def _fixed_spec(value: torch.Tensor) -> TensorSpec:
    """The spec of a tensor, without sizes that only a run will tell."""
    layout: tuple[Any, ...] = (*value.shape, *value.stride())
    if all(isinstance(n, int) for n in layout):
        return TensorSpec.of(value)
    return TensorSpec((), (), value.dtype, value.device)


def _input_alias(
    recording: Recording,
    inputs: list[Input],
    rebuild: _Rebuild,
    owner: int,
    value: torch.Tensor,
    path: str,
    leaf: int,
) -> Alias:
    spec = _place(recording, value, path)
    if owner < 0:
        captured = inputs[-1 - owner]
        assert isinstance(captured, Captured)
        if captured.value.dtype != value.dtype:
            raise TraceError(describe(f"trace({recording.name})(…)", f"{path} is a view of another dtype"))
        spec = dataclasses.replace(spec, offset=spec.offset - captured.value.storage_offset())
        lazy = _differences(value, captured.value)
        return Alias(path, leaf, "input", -1 - owner, spec, value is captured.value, *lazy)
    source = recording.values[owner]
    index, view, _ = rebuild.sources[owner]
    if source.dtype != value.dtype:
        raise TraceError(describe(f"trace({recording.name})(…)", f"{path} is a view of another dtype"))
    start = source.storage_offset() - (view.offset if view is not None else 0)
    spec = dataclasses.replace(spec, offset=spec.offset - start)
    return Alias(path, leaf, "input", index, spec, False, *_differences(value, source))


def _place(recording: Recording, value: torch.Tensor, path: str) -> TensorSpec:
    """Where a result that is a view lies, which must be the same at every call."""
    spec = TensorSpec.of(value)
    place: tuple[Any, ...] = (*spec.shape, *spec.stride, spec.offset)
    if not all(isinstance(n, int) for n in place):
        raise TraceError(describe(f"trace({recording.name})(…)", f"{path} is a view at a place that depends on data"))
    return spec


def _differences(view: torch.Tensor, base: torch.Tensor) -> tuple[bool, bool]:
    """Whether a view is conjugated, and whether it is negated, when it is read, as its base is not."""
    return view.is_conj() != base.is_conj(), view.is_neg() != base.is_neg()


def with_strides(value: Any, like: Any) -> Any:
    """``value`` with the strides that the first run, and so eager, gave it."""
    if not isinstance(value, torch.Tensor) or any(not isinstance(n, int) for n in like.shape):
        return value
    if value.stride() == like.stride() or _is_empty(value):
        return value
    return aten.copy(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device), value)


def whole_memory(value: torch.Tensor, size: int, recording: Recording, position: int) -> torch.Tensor:
    """The memory that several results share, as a flat tensor laid out as in the first run."""
    values = [leaf for leaf in recording.out_leaves if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat))]
    like: Any = values[position]
    value = physical(value)
    if like.untyped_storage().nbytes() == TensorSpec.of(like).nbytes:
        value = with_strides(value, like)
    same = value.stride() == like.stride() and value.storage_offset() == like.storage_offset()
    if not same or value.untyped_storage().nbytes() != size * value.element_size():
        raise TraceError(describe(f"trace({recording.name})(…)", "results share memory in a way that cannot be kept"))
    return value.as_strided((size,), (1,), 0)


def relative_views(graph: fx.Graph, placeholders: list[fx.Node], inputs: list[Input]) -> None:
    """Say where views of a base lie in it, not in its storage: at a call the base lies anywhere in its own."""
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


# Classes of what stands for tensors and numbers in a trace.
_STAND_INS = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_constant(value: Any, environment: Environment) -> bool:
    """Whether all calls may return this very object: it cannot be changed, or was there before the call.

    Args:
        value: What a call returned that is no tensor.
        environment: What the function could reach before the call.
    """
    kind = type(value)
    if issubclass(kind, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    if issubclass(kind, _SINGLETONS) or environment.reaches(value):
        return True
    parts: list[Any] | None = None
    if issubclass(kind, types.FunctionType):
        if not all(environment.reaches(cell) for cell in value.__closure__ or ()):
            return False  # it may assign to a variable that each call has anew
        parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif issubclass(kind, (types.BuiltinFunctionType, types.MethodType)):
        parts = [value.__self__]
    elif kind in (tuple, frozenset):
        parts = list(value)
    elif kind is slice:
        parts = [value.start, value.stop, value.step]
    elif dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # pyright: ignore
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(kind)]
    if parts is not None:
        return all(_is_constant(part, environment) for part in parts)
    # A library's values that are hashed by what they are (a Path, a Fraction); one's own may change their hash.
    return is_library(kind.__module__) and kind.__hash__ not in (None, object.__hash__)
