"""A torch device ``emu`` whose memory is host memory, and which behaves as CUDA where graphs can see it.

Tensors of the device are genuine: they have storages, addresses, views, version counters and autograd. Every ATen
operation that reaches the device (views, allocation and composite operations are taken apart before) is a *launch*:
the CPU kernel runs on CPU views of the same memory. While a recorder is set, it is also told of every launch.
Nothing is registered with torch before ``register`` is called.
"""

# What a backend in Python is made of is private in torch, and has no types.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import atexit
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch.utils import _pytree as pytree  # checked with torch 2.11 and 2.13; public as torch.utils._pytree

from pygraph.ir.descriptors import contiguous_strides
from pygraph.runtime.driver import Counters
from pygraph.runtime.emulated import pinned as emulated_pinned
from pygraph.runtime.emulated import torch_module as emulated_torch
from pygraph.runtime.emulated.dynamo import hide_from_dynamo
from pygraph.runtime.emulated.errors import Guard, replace_engine
from pygraph.runtime.emulated.generator import is_emulated_generator
from pygraph.runtime.emulated.kernels import REPLACEMENTS, Kernel
from pygraph.runtime.emulated.nested import GEOMETRY, NESTED_CPU_KEYS, is_nested, nested_host_view, nested_to_device
from pygraph.runtime.emulated.tensors import (
    CPU_KEYS,
    NAME,
    allocate,
    from_pointer,
    helped,
    host_view,
    is_emulated,
    span_bytes,
)
from pygraph.runtime.emulated.traits import INDEXING, Op, Traits, base_name, traits_of
from pygraph.runtime.emulated.turns import turn

aten: Final = torch.ops.aten
counters: Final = Counters()


class Recorder(Protocol):
    """What is told of launches instead of the counters."""

    def before(self, tensors: Sequence[torch.Tensor]) -> None:
        """These tensors of the device are about to be read or written."""
        ...

    def after(self, launch: Launch) -> None:
        """The launch has run."""
        ...

    def refuse(self, op: str) -> RuntimeError:
        """The error for an operation that cannot be recorded."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """One execution of a kernel.

    Attributes:
        name: The operation's name, e.g. ``aten::add.out``.
        kernel: What runs on CPU tensors; ``aten.copy_`` for copies.
        leaves: The flattened arguments, of ``spec``; tensors are those of the device.
        outputs: Fresh tensors for the results of ``kernel``, None for those that it writes by itself.
    """

    name: str
    kernel: Kernel
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    outputs: tuple[torch.Tensor | None, ...] = ()


recorder: Recorder | None = None


def set_recorder(value: Recorder | None) -> None:
    """Tell ``value`` of the launches from now on; None stops that."""
    global recorder
    recorder = value


# ---- running an operation --------------------------------------------------------------------------------------


@hide_from_dynamo
def _fallback(op: Op, *args: Any, **kwargs: Any) -> Any:
    # No function mode of the user's (a default device, say) may see what the device does inside.
    with turn(), torch._C.DisableTorchFunction():
        special = _SPECIAL.get(op)
        if special is not None:
            return special(*args, **kwargs)
        traits = traits_of(op)
        if traits.view:
            return op.redispatch(CPU_KEYS, *args, **kwargs)
        return _launch(op, traits, args, kwargs)


@hide_from_dynamo
def _nested_fallback(op: Op, *args: Any, **kwargs: Any) -> Any:
    with turn(), torch._C.DisableTorchFunction():
        traits = traits_of(op)
        if traits.view or op in GEOMETRY:
            return op.redispatch(NESTED_CPU_KEYS, *args, **kwargs)
        synchronize(f"{op.name()} of a nested tensor")
        if op is aten._to_copy.default:
            return _nested_copy(*args, **kwargs)
        return _launch(op, traits, args, kwargs)


def _nested_copy(source: torch.Tensor, *, device: torch.device | None = None, **options: Any) -> torch.Tensor:
    """A nested tensor from or to the device, or in another dtype."""
    target = source.device if device is None else device
    copy = nested_host_view(source) if is_emulated(source) else source
    copy = aten._to_copy.default(copy, device=torch.device("cpu"), **options)
    if source.device.type != target.type:
        _count_copy("aten::_to_copy of a nested tensor", copy)
    return nested_to_device(copy) if target.type == NAME else copy


def _launch(op: Op, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    _check_devices(op, traits, args, leaves)
    if traits.synchronizes or _reads_mask(op, args):
        synchronize(op.name())
    # An out= argument without elements may have to grow: running on an empty CPU tensor tells to what size.
    unsized = {
        name: torch.empty(0, dtype=kwargs[name].dtype, device="cpu")
        for name in traits.out
        if is_emulated(kwargs[name]) and kwargs[name].numel() == 0
    }
    if recorder is not None:
        recorder.before([leaf for leaf in leaves if is_emulated(leaf)])
    kernel = REPLACEMENTS.get(op.name(), op)
    if any(isinstance(args[place], (int, float, complex)) for place in traits.operands if place < len(args)):
        kernel = functools.partial(_call_with_numbers, kernel, traits.operands)
    host_args, host_kwargs = pytree.tree_unflatten(_to_host(leaves), spec)
    host_kwargs.update(unsized)
    with torch._C._AutoDispatchBelowAutograd():
        result = _result(op, kernel, host_args, host_kwargs)
    for name, found in unsized.items():
        grown = _resize(kwargs[name], found.shape)
        if grown.stride() != found.stride():
            _set(grown, grown.untyped_storage(), int(grown.storage_offset()), found.shape, found.stride())
        host_view(kwargs[name]).copy_(found)

    outputs: list[torch.Tensor | None] = []

    def deliver(value: object) -> object:
        outputs.append(_to_device(value) if isinstance(value, torch.Tensor) else None)
        return value if outputs[-1] is None else outputs[-1]

    def deliver_return(place: int | str | None, value: object) -> object:
        if place is None:
            return pytree.tree_map(deliver, value)
        outputs.extend([None] * len(pytree.tree_leaves(value)))
        return args[place] if isinstance(place, int) else kwargs[place]

    if len(traits.returns) == 1:
        answer = deliver_return(traits.returns[0], result)
    elif traits.returns:
        answer = tuple(map(deliver_return, traits.returns, result))
    else:
        answer = None
    _count_launch(Launch(op.name(), kernel, tuple(leaves), spec, tuple(outputs)))
    return answer


def _result(op: Op, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a kernel returns; in a recording, which CUDA does not execute, data that it does not take are no error.

    A recording may be made with other numbers than any call has, and an index computed from one may be out of range.
    Results then have the right shapes and no values, which the end of the recording takes away from all of them.
    """
    try:
        return kernel(*args, **kwargs)
    except (IndexError, RuntimeError):
        if recorder is None:
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
    """Run a kernel with Python numbers in place of some tensors.

    Torch turns its "wrapped numbers" (0-d tensors that do not promote the others) into Python numbers for a Python
    kernel, but takes numbers in place of tensors back for a few operations only (add, mul, ...).
    """
    wrapped = [
        _wrapped_number(arg) if place in operands and isinstance(arg, (int, float, complex)) else arg
        for place, arg in enumerate(args)
    ]
    return kernel(*wrapped, **kwargs)


def _wrapped_number(value: complex) -> torch.Tensor:
    # .data copies the flag, which only C++ can set.
    template = _wrapped_numbers()[type(value)]
    return template.data.set_(torch.tensor(value, dtype=template.dtype, device="cpu"))  # pyright: ignore


@functools.cache
def _wrapped_numbers() -> dict[type[complex], torch.Tensor]:
    """A wrapped number of each Python type, as multiplication saves it for its gradient (torch 2.11 to 2.13)."""
    templates: dict[type[complex], torch.Tensor] = {}
    with torch.enable_grad():
        for value in (True, 1, 1.0, 1j):
            product: Any = torch.ones((), requires_grad=True, device="cpu") * value
            templates[type(value)] = product.grad_fn._saved_other
    return templates


def _count_launch(launch: Launch) -> None:
    if recorder is not None:
        recorder.after(launch)
    else:
        counters.launches += 1


def _check_devices(op: Op, traits: Traits, args: tuple[Any, ...], leaves: list[Any]) -> None:
    """Refuse what CUDA refuses: other devices' generators and tensors."""
    indices: set[int] = set()
    if base_name(op) in INDEXING:
        indices = {id(index) for index in args[1] if isinstance(index, torch.Tensor) and not is_emulated(index)}
        for index in args[1]:
            if id(index) in indices:
                _count_copy(op.name(), index)
    for leaf in leaves:
        if isinstance(leaf, torch.Generator) and not is_emulated_generator(leaf):
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{leaf.device.type}'")
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


def synchronize(what: str) -> None:
    """Count that the host waits for the device; refuse it while recording."""
    if recorder is not None:
        raise recorder.refuse(what)
    counters.synchronizations += 1


def _use_random_state() -> None:
    """Refuse what reads or sets the state of the random generator while recording, as CUDA does."""
    if recorder is not None:
        raise recorder.refuse("the state of the random generator")


def _count_copy(what: str, tensor: torch.Tensor) -> None:
    if recorder is not None:
        raise recorder.refuse(what)
    counters.copies += 1
    counters.copied_bytes += tensor.numel() * tensor.element_size()


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
        synchronize("sizes of a nested tensor")
        return nested_to_device(result)
    dense = torch._debug_has_internal_overlap(result) == 0
    stride = result.stride() if dense else contiguous_strides(result.shape)
    tensor = allocate(tuple(result.shape), stride, result.dtype)
    host_view(tensor).copy_(result)
    return tensor


# ---- operations that are no launches ---------------------------------------------------------------------------


def _check_index(device: torch.device | None) -> None:
    if device is not None and device.index not in (None, 0):
        raise RuntimeError(f"{NAME} error: invalid device ordinal: there is no {device}")


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    if layout not in (None, torch.strided):
        raise RuntimeError(f"{NAME} tensors are strided; got {layout}")
    _check_index(device)
    dtype = dtype or torch.get_default_dtype()
    if memory_format in (None, torch.contiguous_format):
        stride = contiguous_strides(tuple(size))
    else:
        stride = torch.empty(size, memory_format=memory_format, device="meta").stride()
    return allocate(size, stride, dtype)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> torch.Tensor:
    _check_index(device)
    return allocate(size, stride, dtype or torch.get_default_dtype())


def _set(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, *geometry: Sequence[int]) -> torch.Tensor:
    return aten.set_.source_Storage_storage_offset.redispatch(CPU_KEYS, tensor, storage, offset, *geometry)


def _resize(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    if tuple(size) == tuple(tensor.shape) and memory_format is None:
        return tensor
    if memory_format in (None, torch.contiguous_format):
        stride = contiguous_strides(tuple(size))
    else:
        stride = torch.empty(size, memory_format=memory_format, device="meta").stride()
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    needed = offset * tensor.element_size() + span_bytes(size, stride, tensor.dtype)
    if needed > storage.nbytes():
        grown = allocate((int(needed),), (1,), torch.uint8)
        old = aten.set_.source_Storage_storage_offset(
            allocate((0,), (1,), torch.uint8), storage, 0, (storage.nbytes(),), (1,)
        )
        if recorder is None:
            host_view(grown)[: storage.nbytes()].copy_(host_view(old))
        storage = grown.untyped_storage()
    return _set(tensor, storage, int(offset), size, stride)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not is_emulated(target):
        synchronize("aten::copy_ (device to host)")
        _count_copy("aten::copy_", source)
        target.copy_(host_view(source))
    elif not is_emulated(source):
        _count_copy("aten::copy_ (host to device)", source)
        host_view(target).copy_(source)
    else:
        if recorder is not None:
            recorder.before([target, source])
        host_view(target).copy_(host_view(source))
        if recorder is not None:
            leaves, spec = pytree.tree_flatten(((target, source), {}))
            recorder.after(Launch("aten::copy_", aten.copy_.default, tuple(leaves), spec, (None,)))
        else:
            _count_copy("aten::copy_", source)
    return target


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if is_emulated(target):
        _resize(target, source.shape)
    else:
        target.resize_(source.shape)
    return _copy_from(source, target)


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    synchronize("aten::_local_scalar_dense")
    return host_view(tensor).item()


_SPECIAL: Final[dict[Op, Callable[..., Any]]] = {
    aten.empty.memory_format: _empty,
    aten.empty_strided.default: _empty_strided,
    aten.resize_.default: _resize,
    aten._copy_from.default: _copy_from,
    aten._copy_from_and_resize.default: _copy_from_and_resize,
    aten._local_scalar_dense.default: _local_scalar_dense,
}


# ---- autocast --------------------------------------------------------------------------------------------------

# What autocast runs in lower precision on CUDA, the usual ones. The list of what it runs in float32 is not emulated.
_LOWER_PRECISION: Final[tuple[Op, ...]] = (
    *(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.linear.default, aten.addmm.default),
    *(aten.baddbmm.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    aten.scaled_dot_product_attention.default,
)


@hide_from_dynamo
def _autocast(op: Op, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(NAME)

    def cast(value: Any) -> Any:
        eligible = is_emulated(value) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible else value

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):  # pyright: ignore
        args, kwargs = pytree.tree_map(cast, (args, kwargs))
        return op(*args, **kwargs)


# ---- registration ----------------------------------------------------------------------------------------------

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Make the device known to torch; calling it again does nothing."""
    if _libraries:
        return
    _wrapped_numbers()  # here, as below autograd nothing is saved
    from torch.utils.backend_registration import (
        _setup_privateuseone_for_python_backend,  # pyright: ignore  # torch 2.11 to 2.13
    )

    module = emulated_torch.device_module(lambda: synchronize("synchronize"), _use_random_state)
    _setup_privateuseone_for_python_backend(NAME, backend_module=module, device_guard=Guard())
    everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    everything.fallback(_nested_fallback, "NestedTensorPrivateUse1")
    # A Python fallback is not found where dispatch modes are set but excluded, as in torch.tensor(..., device=...)
    # under a FakeTensorMode: what that calls gets kernels. Convolutions have kernels for all devices, which only raise,
    # and so do the last two for devices that torch does not know. Group norm's kernel for all devices takes apart
    # what is not contiguous as only the CPU may.
    for op in (
        *_SPECIAL,
        *(
            aten.view.default,
            aten.as_strided.default,
            aten._reshape_alias.default,
            aten.fill_.Scalar,
            aten.zero_.default,
        ),
        *(aten.convolution_overrideable.default, aten.convolution_backward_overrideable.default),
        *(aten.conj_physical_.default, aten.mode.values, aten.native_group_norm.default),
    ):
        some.impl(op, functools.partial(_fallback, op), "PrivateUse1")
    # Resolving a lazy conjugation or negation is a copy; without these, that copy would resolve it first, for ever.
    for key in ("Conjugate", "Negative"):
        some.impl("_copy_from", torch.library.fallthrough_kernel, key)
    some.impl("is_pinned", emulated_pinned.is_pinned, "CPU")
    some.impl("_pin_memory", emulated_pinned.pin_memory, "CPU")
    autocast = torch.library.Library("_", "IMPL")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for op in _LOWER_PRECISION:
        some.impl(op, functools.partial(_autocast, op), "AutocastPrivateUse1")
    _libraries.extend((everything, some, autocast))
    atexit.register(_let_autograd_finish)
    emulated_torch.replace_names(_use_random_state)
    replace_engine()


def _let_autograd_finish() -> None:
    """Let the autograd engine's thread drop its last tensors before the interpreter ends.

    The engine reports a backward as done a little before that, and tensors over memory of Python objects need the
    interpreter's lock to die: a thread that asks for it too late ends the process with an abort.
    """
    if helped.is_set():
        time.sleep(0.05)
