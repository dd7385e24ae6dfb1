"""The cache key of a call: everything that its trace and its kernels depend on, besides what is read live."""

# Settings that choose kernels have public properties ten times as slow as the private getters, see `_SETTINGS`.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from pygraph.guards.iterators import is_opaque
from pygraph.ranges import are_apart, holder, span_of
from pygraph.runtime.body import ALIGNMENT, placement
from pygraph.tracing.leaves import is_live_number, overlap_groups

Key: TypeAlias = tuple[Hashable, tuple[tuple[int, Hashable], ...]]
"""What is known of a call before its trace, and by leaf the values of the numbers that its trace turned out to need."""


class UnhashableError(TypeError):
    """A static argument cannot be part of a key; ``leaf`` is its position."""

    def __init__(self, leaf: int) -> None:
        super().__init__(leaf)
        self.leaf = leaf


_LEAVES = (torch.Tensor, int, float, str, type(None))


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Hashable]:
    """The leaves of ``(args, kwargs)`` and a key of their structure; containers cost a walk, plain leaves do not."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not isinstance(leaf, _LEAVES):
            return pytree.tree_flatten((args, kwargs))
    return leaves, (len(args), *kwargs)


def leaf_keys(leaves: Sequence[Any], static: frozenset[int]) -> tuple[Hashable, ...]:
    """Per leaf: a tensor's class and layout, a live number's type, or a static value itself."""
    keys: list[Hashable] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            address = 0 if leaf.is_cpu else leaf.data_ptr()  # graphs read host memory through copies only
            placed = ALIGNMENT if address % ALIGNMENT == 0 else placement(address)
            # Also under no_grad: a function may ask for it, or enable gradients inside.
            flags = (leaf.requires_grad, leaf.is_inference())
            keys.append((leaf.__class__, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, placed, *flags))
        elif index not in static and is_live_number(leaf):
            keys.append(leaf.__class__)
        else:
            keys.append(static_key(leaf, index))
    return tuple(keys)


def form_of(key: Key) -> Hashable:
    """What a key has in common with those of other calls with objects of no value, as one that is made for each call.

    It is the first part of the key where there are no such objects.
    """
    base: Any = key[0]
    structure, static, leaves, *rest = base
    formed = tuple(kind[0] if _is_identity(kind) else kind for kind in leaves)
    return base if formed == leaves else (structure, static, formed, *rest)


def _is_identity(leaf: Any) -> bool:
    """Whether a leaf's part of a key is equal to that of no other object."""
    return type(leaf) is tuple and len(leaf) == 2 and type(leaf[1]).__hash__ is object.__hash__  # pyright: ignore


def static_key(leaf: Any, index: int) -> Hashable:
    """A key that is equal for equal values only: 1, 1.0 and True differ, as do 0.0 and -0.0."""
    kind: Hashable = leaf.__class__
    if isinstance(leaf, (float, complex)):
        return (kind, repr(leaf))
    if not isinstance(leaf, _LEAVES) and is_opaque(leaf):  # by whatever key, it gives something else at every call
        raise UnhashableError(index)
    try:
        hash(leaf)
    except TypeError:
        raise UnhashableError(index) from None
    return (kind, leaf)


def overlap_key(leaves: Sequence[Any]) -> Hashable:
    """How the tensors share memory: which leaves are the same object or overlap, and at what distance.

    Also whether one storage holds all that overlaps: without one there is no view that stands for all of it.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) < 2 or are_apart(tensors) or not (groups := overlap_groups(leaves)):
        return ()
    key: list[Hashable] = []
    for group in groups:
        members = [leaves[index] for index in group]
        span = span_of(members)
        places = tuple(
            (index, leaves[index].data_ptr() - span[0], next(i for i in group if leaves[i] is leaves[index]))
            for index in group
        )
        key.append((places, holder(members, span) is not None))
    return tuple(key)


def mode_key(device_type: str) -> tuple[Hashable, ...]:
    """Global settings that decide which operations or kernels run."""
    on_cuda = torch.cuda.is_initialized()
    if on_cuda:
        _settle_attention()
    accelerated = torch.is_autocast_enabled(device_type)
    cpu = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        accelerated and torch.get_autocast_dtype(device_type),
        cpu and torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        *(getter() for getter in _SETTINGS),
        looks_at_gradients(),
        _default_device(),
        # Where "cuda" without a number is. Checked with torch 2.11 and 2.13.
        torch._C._cuda_getDevice() if on_cuda else 0,
    )


def looks_at_gradients() -> bool:
    """Whether autograd looks for what is not a number in all that it computes, and raises an error where it is."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


@functools.cache
def _settle_attention() -> None:
    """Have torch choose the order of its attention kernels, a setting that the first attention of a process changes."""
    query = torch.empty(0, 1, 1, 8, dtype=torch.float16, device="cuda")
    with contextlib.suppress(RuntimeError):  # all kernels may be switched off
        torch.ops.aten._fused_sdp_choice(query, query, query)  # checked with torch 2.11 and 2.13


def _default_device() -> Any:
    """The device set by ``torch.set_default_device`` or a ``with`` block; None if there is none."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # checked with torch 2.11 and 2.13
    if context is not None or torch._C._len_torch_function_stack():
        return str(torch.get_default_device())
    return None


# Settings that choose among kernels; their getters in torch._C cost a tenth of the public properties.
# Checked with torch 2.11 and 2.13; tests/unit/test_keys.py compares each with its public property.
_SETTINGS = (
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    functools.partial(torch._C._get_fp32_precision_getter, "cuda", "matmul"),
    functools.partial(torch._C._get_fp32_precision_getter, "cuda", "conv"),
    functools.partial(torch._C._get_fp32_precision_getter, "cuda", "rnn"),
    torch._C._get_cublas_allow_fp16_accumulation,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    torch._C._get_overrideable_sdp_enabled,
    torch._C._get_fa3_sdp_enabled,
    lambda: tuple(torch._C._get_sdp_priority_order()),
    torch._C._get_linalg_preferred_backend,
    torch._C._get_blas_preferred_backend,
    torch._C._get_deterministic_fill_uninitialized_memory,
)
