"""Dispatch of operations on the emulated device: as *launches* of the CPU's kernels on CPU views of its memory."""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

from pygraph.ir.descriptors import contiguous_strides
from pygraph.runtime.emulated import device_lock, launches
from pygraph.runtime.emulated.dynamo import hide_from_dynamo
from pygraph.runtime.emulated.generator import is_emulated_generator
from pygraph.runtime.emulated.kernels import REPLACEMENTS, Kernel
from pygraph.runtime.emulated.nested import GEOMETRY, NESTED_CPU_KEYS, is_nested, nested_host_view, nested_to_device
from pygraph.runtime.emulated.special_operations import SPECIAL, resize, set_memory
from pygraph.runtime.emulated.tensors import CPU_KEYS, NAME, allocate, from_pointer, host_view, is_emulated
from pygraph.runtime.emulated.traits import INDEXING, Op, Traits, base_name, traits_of

aten: Final = torch.ops.aten


@hide_from_dynamo
def fallback(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on tensors of the device; torch calls this for every one that has no kernel of its own."""
    # No function mode of the user's (a default device, say) may see what the device does inside.
    with device_lock.held(), torch._C.DisableTorchFunction():
        special = SPECIAL.get(op)
        if special is not None:
            return special(*args, **kwargs)
        traits = traits_of(op)
        if traits.view:
            return op.redispatch(CPU_KEYS, *args, **kwargs)
        return _launch(op, traits, args, kwargs)


@hide_from_dynamo
def nested_fallback(op: Op, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on nested tensors of the device."""
    with device_lock.held(), torch._C.DisableTorchFunction():
        traits = traits_of(op)
        if traits.view or op in GEOMETRY:
            return op.redispatch(NESTED_CPU_KEYS, *args, **kwargs)
        launches.synchronize(f"{op.name()} of a nested tensor")
        if op is aten._to_copy.default:
            return _nested_copy(*args, **kwargs)
        return _launch(op, traits, args, kwargs)


def _nested_copy(source: torch.Tensor, *, device: torch.device | None = None, **options: Any) -> torch.Tensor:
    """A nested tensor from or to the device, or in another dtype."""
    target = source.device if device is None else device
    copy = nested_host_view(source) if is_emulated(source) else source
    copy = aten._to_copy.default(copy, device=torch.device("cpu"), **options)
    if source.device.type != target.type:
        launches.count_copy("aten::_to_copy of a nested tensor", copy)
    return nested_to_device(copy) if target.type == NAME else copy


def _launch(op: Op, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    _check_devices(op, traits, args, leaves)
    if traits.synchronizes or _reads_mask(op, args):
        launches.synchronize(op.name())
    # An out= argument without elements may have to grow: running on an empty CPU tensor shows to what size.
    unsized = {
        name: torch.empty(0, dtype=kwargs[name].dtype, device="cpu")
        for name in traits.out
        if is_emulated(kwargs[name]) and kwargs[name].numel() == 0
    }
    if launches.recorder is not None:
        launches.recorder.before([leaf for leaf in leaves if is_emulated(leaf)])
    kernel = REPLACEMENTS.get(op.name(), op)
    if any(isinstance(args[index], (int, float, complex)) for index in traits.operands if index < len(args)):
        kernel = functools.partial(_call_with_numbers, kernel, traits.operands)
    host_args, host_kwargs = pytree.tree_unflatten(_to_host(leaves), spec)
    host_kwargs.update(unsized)
    with torch._C._AutoDispatchBelowAutograd():
        result = _result(op, kernel, host_args, host_kwargs)
    for name, found in unsized.items():
        grown = resize(kwargs[name], found.shape)
        if grown.stride() != found.stride():
            set_memory(grown, grown.untyped_storage(), int(grown.storage_offset()), found.shape, found.stride())
        host_view(kwargs[name]).copy_(found)

    outputs: list[torch.Tensor | None] = []

    def deliver(value: object) -> object:
        outputs.append(_to_device(value) if isinstance(value, torch.Tensor) else None)
        return value if outputs[-1] is None else outputs[-1]

    def deliver_return(argument: int | str | None, value: object) -> object:
        if argument is None:
            return pytree.tree_map(deliver, value)
        outputs.extend([None] * len(pytree.tree_leaves(value)))
        return args[argument] if isinstance(argument, int) else kwargs[argument]

    if len(traits.returns) == 1:
        answer = deliver_return(traits.returns[0], result)
    elif traits.returns:
        answer = tuple(map(deliver_return, traits.returns, result))
    else:
        answer = None
    launches.count_launch(launches.Launch(op.name(), kernel, tuple(leaves), spec, tuple(outputs)))
    return answer


def _result(op: Op, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of a kernel; in a recording, which CUDA does not execute, data that it does not take are no error.

    A recording may be made with other numbers than any call has, and an index computed from one may be out of range.
    Results then have the right shapes and no values, which the end of the recording takes away from all of them.
    Whether what is written lies in what is read, the host checks, so CUDA refuses it in recordings, too.
    """
    try:
        return kernel(*args, **kwargs)
    except (IndexError, RuntimeError) as error:
        # The words of torch's check, in 2.11 and 2.13.
        if launches.recorder is None or "to a single memory location" in str(error):
            raise
        try:
            result = op(*pytree.tree_map_only(torch.Tensor, _meta, args), **_meta_options(kwargs))
        except (NotImplementedError, RuntimeError, IndexError):
            result = None  # torch knows no shapes for it, or they are what is wrong
        if result is None:
            raise
    return pytree.tree_map_only(torch.Tensor, _blank, result)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _meta_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    there = torch.device("meta")
    return {
        name: there if isinstance(value, torch.device) else pytree.tree_map_only(torch.Tensor, _meta, value)
        for name, value in kwargs.items()
    }


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").zero_()


def _call_with_numbers(kernel: Kernel, operands: frozenset[int], *args: Any, **kwargs: Any) -> Any:
    """Run a kernel with Python numbers instead of some tensors.

    Torch turns its "wrapped numbers" (0-d tensors that do not promote the others) into Python numbers for a Python
    kernel, but takes numbers instead of tensors back for a few operations only (add, mul, ...).
    """
    wrapped = [
        _wrapped_number(arg) if index in operands and isinstance(arg, (int, float, complex)) else arg
        for index, arg in enumerate(args)
    ]
    return kernel(*wrapped, **kwargs)


def _wrapped_number(value: complex) -> torch.Tensor:
    # .data copies the flag, which only C++ can set.
    template = wrapped_numbers()[type(value)]
    return template.data.set_(torch.tensor(value, dtype=template.dtype, device="cpu"))  # pyright: ignore


@functools.cache
def wrapped_numbers() -> dict[type[complex], torch.Tensor]:
    """A wrapped number of each Python type, as multiplication saves it for its gradient (torch 2.11 to 2.13)."""
    templates: dict[type[complex], torch.Tensor] = {}
    with torch.enable_grad():
        for value in (True, 1, 1.0, 1j):
            product: Any = torch.ones((), requires_grad=True, device="cpu") * value
            templates[type(value)] = product.grad_fn._saved_other
    return templates


def _check_devices(op: Op, traits: Traits, args: tuple[Any, ...], leaves: list[Any]) -> None:
    """Refuse what CUDA refuses: other devices' generators and tensors."""
    indices: set[int] = set()
    if base_name(op) in INDEXING:
        indices = {id(index) for index in args[1] if isinstance(index, torch.Tensor) and not is_emulated(index)}
        for index in args[1]:
            if id(index) in indices:
                launches.count_copy(op.name(), index)
    for leaf in leaves:
        if isinstance(leaf, torch.Generator) and not is_emulated_generator(leaf):
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{leaf.device.type}'")
        if isinstance(leaf, torch.Generator) and launches.recorder is not None:
            launches.recorder.check_generator(leaf)
        if not isinstance(leaf, torch.Tensor) or is_emulated(leaf) or id(leaf) in indices:
            continue
        if leaf.dim() or not traits.takes_host_scalars or leaf.device.type != "cpu":
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and {leaf.device}! (when checking arguments of {op.name()})"
            )


def _reads_mask(op: Op, args: tuple[Any, ...]) -> bool:
    """Whether the operation has to count the set elements of a mask."""
    base = base_name(op)
    # index has called nonzero already, to know the size of its result.
    if base not in INDEXING or base == "index":
        return False
    masks = [index.dtype in (torch.bool, torch.uint8) for index in args[1] if index is not None]
    filled = "put" in base and args[2].numel() == 1 and not any(args[3:4]) and all(masks)
    return any(masks) and not filled


def _to_host(leaves: Sequence[Any]) -> list[Any]:
    """The arguments of the CPU kernel; tensors that share a storage still do, for checks of overlapping writes."""
    storages = [leaf.untyped_storage().data_ptr() for leaf in leaves if is_emulated(leaf) and leaf.numel()]
    shared = {address for address in storages if storages.count(address) > 1} if len(storages) > 1 else set[int]()
    bases: dict[int, torch.UntypedStorage] = {}
    host: list[Any] = []
    for leaf in leaves:
        if not is_emulated(leaf):
            host.append(torch.device("cpu") if isinstance(leaf, torch.device) else leaf)
            continue
        if is_nested(leaf):
            host.append(nested_host_view(leaf))
            continue
        storage = leaf.untyped_storage()
        address = storage.data_ptr()
        if address not in shared or leaf.is_conj() or leaf.is_neg():
            host.append(host_view(leaf))
            continue
        if address not in bases:
            bases[address] = from_pointer(address, torch.device("cpu"), storage.nbytes())
        empty = torch.empty(0, dtype=leaf.dtype, device="cpu")
        host.append(empty.set_(bases[address], leaf.storage_offset(), leaf.shape, leaf.stride()))  # pyright: ignore
    return host


def _to_device(result: torch.Tensor) -> torch.Tensor:
    """A copy of a kernel's result in memory of the device, with its strides unless elements share memory."""
    if result.is_nested:
        launches.synchronize("sizes of a nested tensor")
        return nested_to_device(result)
    dense = torch._debug_has_internal_overlap(result) == 0
    stride = result.stride() if dense else contiguous_strides(result.shape)
    tensor = allocate(tuple(result.shape), stride, result.dtype)
    host_view(tensor).copy_(result)
    return tensor
